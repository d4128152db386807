"""Mesh, sharding tables, and every collective of the project (level 1)."""

from moejax.partitioning.mesh import describe_mesh, make_mesh, near_devices, num_batch_shards
from moejax.partitioning.param_info import ParamInfo
from moejax.partitioning.rules import (
    BATCH_AXES,
    COMPUTE,
    STORED,
    fit_spec,
    spec_for,
    stored_layout,
)
from moejax.partitioning.shard import (
    active_mesh,
    batch_local,
    constrain,
    gather,
    shardings_for,
    stored_spec,
)

__all__ = [
    "BATCH_AXES",
    "COMPUTE",
    "STORED",
    "ParamInfo",
    "active_mesh",
    "batch_local",
    "constrain",
    "describe_mesh",
    "fit_spec",
    "gather",
    "make_mesh",
    "near_devices",
    "num_batch_shards",
    "shardings_for",
    "spec_for",
    "stored_layout",
    "stored_spec",
]
