"""Which rows a host makes, on simulated hosts: those of its devices, microbatch by microbatch."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from moejax.config import MeshConfig
from moejax.config.mesh import DcnConfig
from moejax.partitioning import make_mesh
from moejax.train import own_rows as module
from moejax.train.step import batch_sharding

BATCH, HOSTS = 32, 2


def rows_of_hosts(monkeypatch, mesh, microbatches: int) -> list[tuple[int, ...]]:
    """What `own_rows` says on each of two hosts of four devices."""
    program = types.SimpleNamespace(mesh=mesh)
    whole = batch_sharding(program)
    found = []
    for host in range(HOSTS):
        here = set(jax.devices()[4 * host : 4 * host + 4])

        def own_map(shape, here=here):
            return {d: at for d, at in whole.devices_indices_map(shape).items() if d in here}

        seen = types.SimpleNamespace(addressable_devices_indices_map=own_map)
        monkeypatch.setattr(module, "batch_sharding", lambda _, seen=seen: seen)
        found.append(module.own_rows(program, BATCH, microbatches))
    return found


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("dcn", [{"data": 2}, {"expert": 2}], ids=str)
def test_every_row_is_made_once_and_every_microbatch_is_that_of_one_host(
    monkeypatch, microbatches, dcn
):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, expert=2, dcn=DcnConfig(**dcn)))
    hosts = rows_of_hosts(monkeypatch, mesh, microbatches)
    assert sorted(hosts[0] + hosts[1]) == list(range(BATCH))
    each = BATCH // microbatches
    for rows in hosts:
        assert list(rows) == sorted(rows)
        counts = np.bincount(np.array(rows) // each, minlength=microbatches)
        assert (counts == each // HOSTS).all()
    together = np.diff(hosts[0]).max() == 1
    assert together == ("data" in dcn and microbatches == 1)


def test_one_process_makes_all_rows_in_order():
    program = types.SimpleNamespace(mesh=make_mesh(MeshConfig(fsdp=2, expert=4)))
    assert module.own_rows(program, BATCH, 4) == tuple(range(BATCH))
