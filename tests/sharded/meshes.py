"""Meshes of the sharded tests, and the measure in which two arrays agree."""

import jax
import numpy as np
from jax.sharding import Mesh

from moejax.config import MeshConfig
from moejax.partitioning import make_mesh

ONE = {"fsdp": 1}  # on the first device alone
FSDP8 = {"fsdp": 8}
EXPERT8 = {"fsdp": 1, "expert": 8}
FSDP2_EXPERT4 = {"fsdp": 2, "expert": 4}
DATA2_EXPERT4 = {"data": 2, "fsdp": 1, "expert": 4}
DATA2_FSDP2_EXPERT2 = {"data": 2, "fsdp": 2, "expert": 2}


def mesh_of(sizes: dict[str, int]) -> Mesh:
    """A mesh of these sizes over as many simulated devices as it needs."""
    count = int(np.prod(list(sizes.values())))
    return make_mesh(MeshConfig(**sizes), jax.devices()[:count])


def named(sizes: dict[str, int]) -> str:
    """Name of a mesh in a test's id."""
    return "-".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1) or "one"


def relative_error(got, want) -> float:
    """Largest difference over the largest magnitude of `want`; 0 where both are all zeros."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    difference = np.max(np.abs(got - want), initial=0.0)
    return float(difference / np.max(np.abs(want), initial=0.0)) if difference else 0.0


def assert_leaves_agree(got, want, tolerance: float) -> None:
    """Every leaf within `tolerance` of its own largest magnitude; the worst ones are named."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    errors = [(relative_error(leaf, other), path) for (path, leaf), other in pairs]
    wrong = sorted(((e, jax.tree_util.keystr(p)) for e, p in errors if not e <= tolerance))
    assert not wrong, "; ".join(f"{path}: {e:.1e}" for e, path in reversed(wrong[-8:]))
