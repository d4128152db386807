"""A run on fewer or more devices: its batch stays, its microbatches follow, what cannot is told."""

import pytest

from moejax.config import ConfigError
from moejax.config.load import load_config

ELASTIC = {
    "data.batch_size": 16, "train.rows_per_device": 2, "mesh.fsdp": -1, "mesh.expert": 2,
    "eval.batch_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(("devices", "microbatches"), [(16, 1), (8, 1), (4, 2), (2, 4)])
def test_fewer_devices_take_the_batch_in_more_parts(devices, microbatches):
    cfg = load_config("tiny", ELASTIC).on(devices)
    assert cfg.train.accumulation == microbatches and cfg.data.batch_size == 16
    assert cfg.on(devices) == cfg
    cfg.check(devices)


def test_rows_that_are_not_a_multiple_are_the_most_that_divide():
    cfg = load_config("tiny", ELASTIC | {"data.batch_size": 24, "eval.batch_size": 24})
    assert cfg.replace(train=cfg.train.replace(rows_per_device=5)).on(4).train.accumulation == 2


def test_off_it_changes_nothing():
    cfg = load_config("tiny", {"mesh.fsdp": -1, "train.accumulation": 2, "mesh.expert": 1})
    assert cfg.on(4) is cfg


@pytest.mark.parametrize(
    ("devices", "per_host", "says"),
    [
        (6, 1, "numbers of devices that fit this run: 4 or 8."),
        (3, 1, "numbers of devices that fit this run: 2 or 4."),
        (6, 2, "numbers of devices that fit this run: 4 (2 hosts) or 8 (4 hosts)."),
        (32, 4, "numbers of devices that fit this run: 16 (4 hosts)."),
    ],
)
def test_a_count_that_cannot_is_refused_with_the_nearest_that_can(devices, per_host, says):
    with pytest.raises(ConfigError) as raised:
        load_config("tiny", ELASTIC).check(devices, per_host)
    assert str(raised.value).endswith(says) and "\n" not in str(raised.value)
