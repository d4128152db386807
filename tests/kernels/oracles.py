"""The op oracles (`tests/fixtures/ops`): read through `Case`, which knows what nobody has read.

`GROUPS` says which test answers for which arrays: file, then kind, then the first parts of the
names. A test takes its groups from here and ends with `Case.done`, so an array that no test looks
at fails either that test or `test_every_array_has_a_test`.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures" / "ops"
IMPLS = ("chunked", "ref")
FLOAT32, BFLOAT16 = "float32", "bfloat16"
DTYPES = (FLOAT32, BFLOAT16)

GROUPS = {
    "kda": {
        "recurrence": (
            "T1_normal", "T63_normal", "T64_normal", "T65_normal", "T257_normal", "T65_extreme",
            "T130_extreme", "T33_all_minus20", "T66_zero_decay_beta1", "T20_beta0",
            "T96_lower_bound",
        ),
        "fused": ("fused_softplus", "fused_lower_bound"),
        "packed": ("varlen",),
    },
    "dsa": {
        "module": ("indexer_v32", "indexer_glm"),
        "sparse": ("sparse_short", "sparse_mqa", "sparse_gqa", "sparse_varlen"),
    },
    "dsa_indexer_kl": {"stages": ("short", "mqa")},
    "attnres": {
        "mix": ("L1_plain", "L2_plain", "L5_plain", "L1_outnorm", "L2_outnorm", "L5_outnorm"),
    },
    "cross_entropy": {"losses": ("n1", "n37", "n65"), "nothing": ("all_ignored",)},
    "short_conv": {"conv": ("B1C6T1K4", "B1C8T2K3", "B2C10T17K4")},
    "situ": {"situ": ("k3", "small", "one_none")},
    "rope": {"rotation": ("default", "yarn", "yarn_mscale")},
    "router": {"router": ("nogroup", "group4", "group8_k6")},
}  # fmt: skip


@functools.cache
def arrays_of(file: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{file}.npz") as stored:
        return {name: stored[name] for name in stored.files}


def error(actual, expected: np.ndarray, floor: float = 1e-3) -> float:
    """max |actual - expected| over max |expected|, the latter at least `floor`."""
    actual = np.asarray(jnp.asarray(actual).astype(jnp.float32), np.float64)
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape}, the oracle has {expected.shape}")
    scale = max(float(np.abs(expected).max()), floor)
    return float(np.abs(actual - expected).max()) / scale


class Case:
    """The arrays below one group of a file; remembers which have been read."""

    def __init__(self, file: str, group: str):
        self._arrays = {
            name.removeprefix(f"{group}/"): array
            for name, array in arrays_of(file).items()
            if name.startswith(f"{group}/")
        }
        self._unread = set(self._arrays)
        self.group = group

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> np.ndarray:
        self._unread.discard(name)
        return self._arrays[name]

    def peek(self, name: str) -> np.ndarray:
        """The array for a bound or a shape; the comparison itself is still due."""
        return self._arrays[name]

    def below(self, prefix: str) -> list[str]:
        """Names that start with `prefix`, without it."""
        return [name[len(prefix) :] for name in self._arrays if name.startswith(prefix)]

    def check(self, name: str, actual, limit: float, *, floor: float = 1e-3, expected=None) -> None:
        """Compares with array `name`, or with `expected` where that is another view of it."""
        stored = self[name]
        got = error(actual, stored if expected is None else expected, floor)
        assert got <= limit, f"{self.group}/{name}: error {got:.3g} > {limit:.3g}"

    def done(self) -> None:
        assert not self._unread, f"{self.group}: not compared: {sorted(self._unread)}"


def uncovered() -> dict[str, set[str]]:
    """File to its groups that no entry of `GROUPS` names, and the other way round."""
    gaps = {}
    for path in FOLDER.glob("*.npz"):
        stored = {name.split("/")[0] for name in arrays_of(path.stem)}
        named = {group for groups in GROUPS.get(path.stem, {}).values() for group in groups}
        if stored ^ named:
            gaps[path.stem] = stored ^ named
    return gaps


# A case runs once: compiled in a third of the time.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
everywhere = pytest.mark.parametrize(
    ("impl", "dtype"), [(impl, dtype) for impl in IMPLS for dtype in DTYPES]
)


def each(file, kind):
    return pytest.mark.parametrize("group", GROUPS[file][kind])


def limit(dtype, float32, bfloat16):
    return float32 if dtype == FLOAT32 else bfloat16
