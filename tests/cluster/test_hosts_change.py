"""A run whose number of hosts changes is the run of one: real processes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moejax.config.load import RESOLVED_FILE
from tests.cluster.test_launch import FEW, _ended, launch
from tests.e2e.small import SMALL, command, flags, position, rows

pytestmark = pytest.mark.slow

FILES = {"source": "files", "paths": list(SMALL["data.paths"])}
MIXED = FEW | {
    "mesh__fsdp": 2, "mesh__expert": 2, "train__accumulation": 2, "train__num_steps": 12,
    "checkpoint__every": 4, "data__source": "stdlib", "data__paths": "()",
    "data__mixture": json.dumps([{"name": "a", "weight": 0.7, **FILES},
                                 {"name": "b", "source": "synthetic", "weight": 0.3}]),
}  # fmt: skip


def test_4_then_2_then_1_process_see_the_tokens_of_one_run(tmp_path):
    """The same four devices, in fewer and fewer processes; experts lie across them throughout."""
    workdir = tmp_path / "hosts"
    for processes, until in ((4, 4), (2, 8), (1, 12)):
        changes = MIXED | {"train__stop_at": until}
        each = {"processes": processes, "devices": 4 // processes}
        run = launch(workdir, **each, **changes)
        code, said = _ended(run)
        assert code == 0, said
        assert position(workdir, until)["data"]["rows"] == until * SMALL["data.batch_size"]
    code, said = _ended(command(tmp_path / "one", 4, flags(**MIXED)))
    assert code == 0, said
    _same(tmp_path / "one", workdir)
    assert position(tmp_path / "one", 12)["data"] == position(workdir, 12)["data"]


def test_experts_across_two_hosts_with_rows_that_do_not_stand_together(tmp_path):
    """`mesh.dcn.expert`: a host has every other part of the batch, of each microbatch."""
    changes = MIXED | {"mesh__dcn__expert": 2, "train__num_steps": 3, "checkpoint__every": 0}
    code, said = _ended(launch(tmp_path / "two", processes=2, devices=2, **changes))
    assert code == 0, said
    code, said = _ended(command(tmp_path / "one", 4, flags(**changes)))
    assert code == 0, said
    _same(tmp_path / "one", tmp_path / "two")


def test_fewer_then_more_devices_keep_batch_and_steps_and_the_loss_goes_on(tmp_path):
    """4, then 2, then 8 devices: 1, 2 and 1 microbatches of the same 8 rows."""
    elastic = MIXED | {"mesh__fsdp": -1, "train__accumulation": 1, "train__rows_per_device": 2}
    workdir, microbatches = tmp_path / "elastic", []
    for processes, devices, until in ((2, 2, 4), (1, 2, 8), (4, 2, 12)):
        changes = elastic | {"train__stop_at": until}
        code, text = _ended(launch(workdir, processes=processes, devices=devices, **changes))
        assert code == 0, text
        resolved = json.loads((workdir / RESOLVED_FILE).read_text())
        microbatches.append(resolved["train"]["accumulation"])
    assert microbatches == [1, 2, 1]
    code, text = _ended(command(tmp_path / "one", 4, flags(**elastic)))
    assert code == 0, text
    _same(tmp_path / "one", workdir, rtol=1e-5)
    one, other = (rows(folder) for folder in (tmp_path / "one", workdir))
    assert [row["step"] for row in other] == list(range(1, 13))
    assert [row["tokens"] for row in one] == [row["tokens"] for row in other]
    assert position(tmp_path / "one", 12)["data"] == position(workdir, 12)["data"]


def _same(one, other, rtol: float = 1e-6) -> None:
    for name in ("loss", "grad_norm"):
        got, want = ([row[name] for row in rows(folder)] for folder in (other, one))
        np.testing.assert_allclose(got, want, rtol=rtol)
