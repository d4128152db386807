"""What hardware is called, what is wrong with a name, and the least time it allows."""

from __future__ import annotations

import os
import types

import numpy as np
import pytest

from moejax.config import ConfigError
from moejax.partitioning import near_devices
from moejax.planner import aot
from moejax.planner.aot import absent_devices
from moejax.planner.collectives import Collective
from moejax.planner.hardware import CHIPS, num_chips, parse_hardware, target_config
from moejax.planner.roofline import roofline, split_bytes, with_links


@pytest.mark.parametrize(
    ("text", "platform", "shape", "memory"),
    [
        ("h100:2x8", "cuda", (2, 8), 80e9),
        ("h200:16x8", "cuda", (16, 8), 141e9),
        ("B200:1x8", "cuda", (1, 8), 192e9),
        ("v5p:4x4x8", "tpu", (4, 4, 8), 95 * 2**30),
        ("v6e:4x4", "tpu", (4, 4), 32 * 2**30),
        ("tpu7x:2x2x1", "tpu", (2, 2, 1), 96 * 2**30),  # of a core; a chip has two
        ("v5p:2x2x2*3", "tpu", (2, 2, 2), 95 * 2**30),
    ],
)
def test_hardware_by_name(text, platform, shape, memory):
    hardware = parse_hardware(text)
    assert (hardware.chip.platform, hardware.shape) == (platform, shape)
    assert hardware.chip.memory_bytes == memory
    assert hardware.slices == (3 if "*" in text else 1)
    assert num_chips(hardware) == np.prod(shape) * hardware.slices
    assert hardware.topology == text.removesuffix("*3")


def test_simulated_devices_share_the_machine():
    one, eight = parse_hardware("cpu:1").chip, parse_hardware("cpu:8").chip
    assert one.memory_bytes // 8 == eight.memory_bytes > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a100:1x8", "known are h100, h200, b200, b300, v5p, v6e, tpu7x, cpu"),
        ("h200", "hosts x GPUs a host, as in h200:16x8"),
        ("h200:128", "hosts x GPUs a host, as in h200:16x8"),
        ("h200:0x8", "hosts x GPUs a host"),
        ("h200:1x8,", "hosts x GPUs a host"),
        ("v6e:16", "the topology in chips, as in v6e:4x4"),
        ("cpu:2x4", "as in cpu:8"),
        ("h200:2x8*2", "only TPUs have slices, as in v5p:4x4x8*2"),
        (
            "v5p:2x2x1*0",
            "0 after the * is no number of slices; it must be an integer of at least 1",
        ),
        ("v5p:2x2x1*", "nothing after the * is no number of slices"),
        ("v6e:4x4*two", "as in v6e:4x4*2 for two slices"),
        ("cpu:8*", "only TPUs have slices"),
        ("", "unknown hardware"),
    ],
)
def test_a_wrong_name_is_one_clear_line(text, says):
    with pytest.raises(ConfigError) as refused:
        parse_hardware(text)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_every_gpu_has_a_whole_target_description():
    for chip in CHIPS.values():
        if chip.target:
            text = target_config(chip)
            assert "{" + "major" not in text and f'"{dict(chip.target)["name"]}"' in text
            assert text.count("{") == text.count("}")
            # What is sold is at most what the driver reports, and not much less.
            assert 0.93 < chip.memory_bytes / dict(chip.target)["device_memory_size"] < 1.01


NEAR = {"data": 1, "fsdp": 2, "expert": 8}  # hosts of 16


def _row(kind: str, axes: str, group: int, sent: int) -> Collective:
    return Collective(kind, axes, group, 1, 0, sent)


@pytest.mark.parametrize(
    ("row", "fast", "slow"),
    [
        # Inside one host nothing crosses.
        (_row("all-reduce", "fsdp", 2, 100), 100, 0),
        # 64 devices, 8 a host: 56 of 63 peers are elsewhere.
        (_row("all-to-all", "expert", 64, 63), 7, 56),
        # 64 devices of 4 hosts with 16 each, all-gather of 64 units: three quarters of them come
        # from other hosts and are shared among 16; a device then passes on 15 of 16 shares.
        (_row("all-gather", "fsdp*expert", 64, 63), 60, 3),
        # One device a host: a ring over the network.
        (_row("all-reduce", "data", 4, 60), 0, 60),
        (_row("collective-permute", "data", 2, 9), 0, 9),
    ],
)
def test_bytes_are_split_by_the_links_they_use(row, fast, slow):
    assert split_bytes(row, NEAR) == pytest.approx((fast, slow))


def test_the_largest_term_bounds_the_step():
    chip = CHIPS["h200"]
    rows = [
        _row("all-gather", "fsdp", 2, int(45e9)),  # 0.1 s on NVLink
        _row("all-to-all", "data", 4, int(25e9)),  # 0.5 s on the network
        Collective("all-to-all", "data", 4, 1, 0, int(1e15), open_loop=True),
    ]
    bound = roofline(
        model_flops=3e14, hardware_flops=4e14, hbm_bytes=9.6e11,
        collectives=[with_links(row, NEAR) for row in rows], chip=chip, peak_flops=1e15,
    )  # fmt: skip
    terms = (bound.compute_s, bound.hbm_s, bound.link_s, bound.network_s)
    assert terms == pytest.approx((0.4, 0.2, 0.1, 0.5))
    assert (bound.bound, bound.step_s, bound.serial_s) == pytest.approx(("network", 0.5, 1.2))
    assert (bound.mfu, bound.serial_mfu) == pytest.approx((0.6, 0.25))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_neighbours_are_those_of_a_host_or_a_slice(platform):
    """Four hosts of four, as fsdp=2 x expert=8; a TPU's hosts are all in one slice."""
    devices = np.empty(16, object)
    for i in range(16):
        devices[i] = types.SimpleNamespace(platform=platform, process_index=i // 4)
    mesh = types.SimpleNamespace(devices=devices.reshape(1, 2, 8), axis_names=list(NEAR))
    alone = {"data": 1, "fsdp": 1, "expert": 4}
    together = {"data": 1, "fsdp": 2, "expert": 8}
    assert near_devices(mesh) == (alone if platform == "cuda" else together)


def test_describing_absent_devices_leaves_the_environment_alone(monkeypatch):
    """Where this process runs is read from the variables that libtpu is kept quiet with."""
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "mine")
    before = dict(os.environ)
    seen = []

    def describe(*_, **__):
        seen.append((os.environ["TPU_WORKER_HOSTNAMES"], os.environ["TPU_ACCELERATOR_TYPE"]))
        raise RuntimeError("none here")

    monkeypatch.setattr(aot.topologies, "get_topology_desc", describe)
    with pytest.raises(ConfigError):
        absent_devices(parse_hardware("v5p:2x2x1"))
    assert seen == [("localhost", "mine")] and dict(os.environ) == before
