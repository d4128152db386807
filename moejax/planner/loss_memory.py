"""Compiled memory of the loss and its gradients alone, for hardware that is not here.

python -m moejax.planner.loss_memory --hardware=h200:1x8,v5p:2x2x2
"""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig
from moejax.losses.budget import LossPlan, plan_loss
from moejax.losses.sharded_head import sharded_head_loss
from moejax.partitioning import BATCH_AXES, make_mesh, stored_layout
from moejax.planner.aot import absent_devices
from moejax.planner.hardware import parse_hardware
from pallas_kernels.choose import lowering_for

AXES = ("vocab", "embed")


class LossMemory(NamedTuple):
    """Bytes on a device: of the program, and as planned."""

    plan: LossPlan
    arguments: int
    results: int
    temporaries: int


def loss_memory(
    hardware: str, *, rows: int, vocab: int, dim: int, trained: bool, budget: int
) -> LossMemory:
    """Compiles value and gradients of the loss under a head in pieces.

    Args:
      hardware: as `moejax compile --hardware`; the head lies over all devices.
      rows: tokens of a device.
      vocab, dim: of the head, float32 where it is trained and bfloat16 where not.
      trained: whether the head has a gradient.
      budget: bytes of temporaries on a device.
    """
    wanted = parse_hardware(hardware)
    mesh = make_mesh(MeshConfig(fsdp=-1), absent_devices(wanted))
    count = mesh.devices.size
    plan = plan_loss(rows, vocab, dim, itemsize=2, num_shards=count, trained=trained, budget=budget)

    def loss(x_MD, table_VD, labels_M):
        return sharded_head_loss(x_MD, table_VD, labels_M, AXES, rows=plan.rows, vocab=plan.vocab)

    def placed(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    table = placed(
        (vocab, dim), jnp.float32 if trained else jnp.bfloat16,
        stored_layout(AXES, (vocab, dim), dict(mesh.shape)),
    )  # fmt: skip
    x = placed((rows * count, dim), jnp.bfloat16, P(BATCH_AXES))
    labels = placed((rows * count,), jnp.int32, P(BATCH_AXES))
    grads = (0, 1) if trained else (0,)
    where = [x.sharding, table.sharding][: len(grads)]
    platform = {"cuda": "gpu"}.get(wanted.chip.platform, wanted.chip.platform)
    with jax.set_mesh(mesh), lowering_for(platform, hardware.partition(":")[0]):
        run = jax.jit(
            jax.value_and_grad(loss, grads), out_shardings=(NamedSharding(mesh, P()), tuple(where))
        )
        facts = run.lower(x, table, labels).compile().memory_analysis()
    assert facts is not None  # both compilers have one
    held = facts.argument_size_in_bytes + facts.output_size_in_bytes
    temporaries = facts.temp_size_in_bytes
    if platform == "tpu":  # its temporaries count on-chip memories, its peak does not
        temporaries = facts.peak_memory_in_bytes - held
    return LossMemory(plan, facts.argument_size_in_bytes, facts.output_size_in_bytes, temporaries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="h200:1x8,v5p:2x2x2")
    parser.add_argument("--rows", type=int, default=131_072, help="tokens of a device")
    parser.add_argument("--vocab", type=int, default=163_840)
    parser.add_argument("--dim", type=int, default=7168)
    parser.add_argument("--gib", type=float, default=1.0, help="budget of temporaries")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for hardware in options.hardware.split(","):
        for trained in (False, True):
            found = loss_memory(
                hardware, rows=options.rows, vocab=options.vocab, dim=options.dim,
                trained=trained, budget=int(options.gib * 2**30),
            )  # fmt: skip
            sizes = [x / 2**30 for x in (*found[1:], found.plan.temp_bytes)]
            print(
                f"{hardware}, head {'trained' if trained else 'frozen'}: arguments {sizes[0]:.2f}, "
                f"results {sizes[1]:.2f}, temporaries {sizes[2]:.3f} (planned {sizes[3]:.3f}) GiB; "
                f"{found.plan.reason}",
                flush=True,
            )


if __name__ == "__main__":
    main()
