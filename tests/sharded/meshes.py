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


def relative_error(got, want, floor: float = 0.0) -> float:
    """Largest difference over the largest magnitude of `want`, or over `floor` if larger."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    scale = max(np.max(np.abs(want), initial=0.0), floor)
    difference = np.max(np.abs(got - want), initial=0.0)
    return float(difference / scale) if difference else 0.0


def errors_by_leaf(got, want, floor: float = 0.0) -> dict[str, float]:
    """`relative_error` of every leaf, by its path."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    return {
        jax.tree_util.keystr(path): relative_error(leaf, other, floor)
        for (path, leaf), other in pairs
    }


def assert_leaves_agree(got, want, tolerance: float, floor: float = 0.0) -> None:
    """Every leaf within `tolerance`, each in its own scale; the worst ones are named."""
    errors = errors_by_leaf(got, want, floor)
    wrong = sorted(((e, path) for path, e in errors.items() if not e <= tolerance), reverse=True)
    assert not wrong, "; ".join(f"{path}: {e:.1e}" for e, path in wrong[:8])
