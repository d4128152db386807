"""Named cases of lightning_indexer, tolerances, and what a case costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gate_case import GateCase
from pallas_kernels.lightning_indexer.api import lightning_indexer
from pallas_kernels.mla_attention.specs import segments

# Relative RMS error of the chosen scores against ref.py; the chosen keys agree but for near ties.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes, and where documents begin; `padding` positions close each row."""

    B: int
    T: int
    S: int
    U: int
    u: int
    J: int
    starts: tuple[int, ...] = ()
    padding: int = 0

    def inputs(self, dtype=jnp.float32, seed: int = 0, whole: bool = False) -> dict:
        """Normal inputs; `whole` makes them small integers: scores tie and sums are exact."""
        rng = np.random.default_rng(seed)
        shapes = {
            "q_idx": (self.B, self.T, self.U, self.u),
            "k_idx": (self.B, self.S, self.u),
            "w_idx": (self.B, self.T, self.U),
        }
        arrays: dict[str, jax.Array | None] = {}
        for name, shape in shapes.items():
            drawn = rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)
            arrays[name] = jnp.asarray(drawn.astype(dtype))
        arrays["segment_ids"] = None
        if self.starts or self.padding:
            arrays["segment_ids"] = segments(self.B, self.T, self.starts, self.padding)
        return arrays

    def options(self) -> dict:
        """Keyword options: queries are the last T of S positions."""
        return {"top_k": self.J, "q_offset": self.S - self.T}

    def flops(self) -> int:
        """Multiply-adds times two of the dot products over visible pairs."""
        pairs = self.T * self.S - self.T * (self.T - 1) // 2
        return 2 * self.B * self.U * self.u * pairs


CASES = {
    "one": Case(2, 1, 1, 4, 4, 1),
    "odd63": Case(2, 63, 63, 4, 4, 7),
    "odd65_packed": Case(2, 65, 65, 4, 4, 16, starts=(1, 33), padding=7),
    "one_key": Case(2, 65, 65, 1, 4, 1),
    "more_than_all": Case(1, 63, 63, 4, 4, 80, starts=(40,)),
    "two_blocks": Case(1, 300, 300, 4, 4, 9, starts=(150,), padding=3),
    "later_queries": Case(1, 33, 290, 4, 4, 8),
}
LARGE = Case(1, 2048, 2048, 4, 16, 8)
# Heads of the published models' indexers, 128 wide; both choose 2048 keys.
MODELS = {"K3.1": 32, "DeepSeek-V3.2": 64}


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: rows of 8, 32 and 128 K tokens, and one more query behind them."""
    cases = []
    for model, heads in MODELS.items():
        for length in (8192, 32768, 131072):
            short = f"{length // 1024} K"
            quick = (model, length) == ("K3.1", 8192)
            cases.append(_gate_case(f"{model} {short}", heads, length, length, platform, quick))
            if platform == "gpu":
                name = f"{model} one query, {short}"
                cases.append(_gate_case(name, heads, 1, length, platform, quick=False))
    return cases


def _gate_case(name, heads, queries, keys, platform, quick) -> GateCase:
    def run(q_idx, k_idx, w_idx, segment_ids, kv_segment_ids):
        return lightning_indexer(
            q_idx, k_idx, w_idx, top_k=2048, segment_ids=segment_ids, q_offset=keys - queries,
            kv_segment_ids=kv_segment_ids, order="position", impl=f"pallas_{platform}",
        )  # fmt: skip

    shape, low = jax.ShapeDtypeStruct, jnp.bfloat16
    args = (
        shape((1, queries, heads, 128), low), shape((1, keys, 128), low),
        shape((1, queries, heads), jnp.float32), shape((1, queries), jnp.int32),
        shape((1, keys), jnp.int32),
    )  # fmt: skip
    # the kernel of a few queries has a name of its own, but it begins alike
    bound = ("index_scores",) if queries > 1 else ()
    return GateCase(f"lightning_indexer {name}", run, args, bound, quick)
