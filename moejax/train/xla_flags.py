"""What XLA is asked for, mostly so that collectives run beside compute: a table with reasons.

Given with each compilation and not by environment variables, so that `moejax compile` and `train`
ask for the same. `launch/README.md` has the effect of each as seen in compiled steps.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LEVELS = ("off", "within", "ahead")  # values of train.prefetch


class Flag(NamedTuple):
    """One option of the compiler.

    Attributes:
      platform: gpu or tpu.
      level: of `LEVELS`, from which on it is set.
      name, value: as the compiler knows them.
      why: what it is there for.
    """

    platform: str
    level: str
    name: str
    value: bool | int
    why: str


FLAGS = (
    Flag("gpu", "ahead", "xla_gpu_enable_latency_hiding_scheduler", True,
         "collectives begin as early and end as late as what they wait for allows; XLA leaves it "
         "off in programs with an expert exchange, whose own order hides more of it"),
    Flag("gpu", "ahead", "xla_gpu_enable_pipelined_all_gather", True,
         "a scanned layer's weights are gathered while the layer before computes"),
    Flag("gpu", "ahead", "xla_gpu_enable_pipelined_reduce_scatter", True,
         "a scanned layer's gradients are scattered while the layer after computes"),
    Flag("gpu", "ahead", "xla_gpu_enable_pipelined_all_reduce", True,
         "the same for what is summed and not scattered"),
    Flag("gpu", "within", "xla_gpu_enable_pipelined_host_offloading", True,
         "results in host memory come back while the repeat behind theirs computes"),
    Flag("tpu", "off", "xla_tpu_enable_deduplicated_calls", True,
         "layers of one kind share the code of what they compute alike, so programs are smaller"),
    Flag("tpu", "within", "xla_enable_async_all_gather", True,
         "gathers may begin apart from their end"),
    Flag("tpu", "within", "xla_tpu_enable_async_collective_fusion_fuse_all_gather", True,
         "and are fused with the compute beside them; neither does anything alone"),
    Flag("tpu", "within", "xla_tpu_enable_async_ragged_all_to_all", True,
         "rows travel to their experts and back while others are in them"),
)  # fmt: skip


def flags_for(prefetch: str, platform: str) -> dict[str, bool | int]:
    """Options of a platform (`gpu` or `cuda`, `tpu`, `cpu`) at a level of `train.prefetch`."""
    platform = {"cuda": "gpu"}.get(platform, platform)
    wanted = LEVELS[: LEVELS.index(prefetch) + 1]
    return {f.name: f.value for f in FLAGS if f.platform == platform and f.level in wanted}


def compiler_options(prefetch: str, mesh: Mesh) -> dict[str, Any]:
    """Options for programs on a mesh; none on one device, and none that its compiler lacks.

    Names come and go between versions of XLA, and an unknown one would end the run: a program of
    one number is compiled first, and what that refuses is left out with a warning.
    """
    if mesh.devices.size == 1:
        return {}
    return accepted(flags_for(prefetch, mesh.devices.flat[0].platform), mesh)


def accepted(flags: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Those of the options that the mesh's compiler knows."""
    left = dict(flags)
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    while left:
        try:
            jax.jit(lambda x: x + 1, compiler_options=left).lower(number).compile()
            break
        except jax.errors.JaxRuntimeError as error:
            refused = re.findall(r"No such compile option: '?(\w+)", str(error))
            refused = [name for name in refused if name in left]
            if not refused:
                raise
        for name in refused:
            del left[name]
        warnings.warn(
            f"this XLA has no option {', '.join(refused)}: compiled without it, so that "
            "programs may be larger or fewer collectives run beside compute.",
            stacklevel=3,
        )
    return left
