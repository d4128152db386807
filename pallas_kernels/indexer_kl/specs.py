"""Named cases of indexer_kl, tolerances, and what a case costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import NO_KEY_LSE
from pallas_kernels.gate_case import GateCase
from pallas_kernels.indexer_kl.api import indexer_kl
from pallas_kernels.mla_attention.specs import segments

# Relative RMS error against ref.py in float32 arithmetic, values and gradients alike.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes, and where documents begin; J None is the dense stage."""

    B: int
    T: int
    N: int
    C: int
    R: int
    U: int
    u: int
    J: int | None
    starts: tuple[int, ...] = ()
    padding: int = 0

    def inputs(self, dtype=jnp.float32, seed: int = 0) -> dict[str, jax.Array]:
        """Normal inputs of both attentions and segment ids; lse and indices are the caller's."""
        rng = np.random.default_rng(seed)
        shapes = {
            "q_idx": (self.B, self.T, self.U, self.u),
            "k_idx": (self.B, self.T, self.u),
            "w_idx": (self.B, self.T, self.U),
            "q_latent": (self.B, self.T, self.N, self.C),
            "q_rope": (self.B, self.T, self.N, self.R),
            "latent": (self.B, self.T, self.C),
            "k_rope": (self.B, self.T, self.R),
        }
        arrays = {
            name: jnp.asarray(rng.standard_normal(shape).astype(dtype))
            for name, shape in shapes.items()
        }
        return arrays | {"segment_ids": segments(self.B, self.T, self.starts, self.padding)}

    def options(self) -> dict:
        """Keyword options."""
        return {"scale": (self.C + self.R) ** -0.5}

    def flops(self) -> int:
        """Forward multiply-adds times two: main scores and index dot products."""
        keys = self.J if self.J is not None else (self.T + 1) // 2
        return 2 * self.B * self.T * keys * (self.N * (self.C + self.R) + self.U * self.u)


def with_sets(case: Case, x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Adds random indices of each query's document if there is a J, and the lse over the set."""
    seg = np.asarray(x["segment_ids"])
    mask = (seg[:, :, None] == seg[:, None]) & (seg > 0)[..., None] & np.tri(case.T, dtype=bool)
    if case.J:
        draw = np.where(mask, np.random.default_rng(0).random(mask.shape), -1)
        order = np.argsort(-draw, axis=-1)[..., : case.J]
        indices = np.where(np.take_along_axis(mask, order, -1), order, -1).astype(np.int32)
        widths = ((0, 0), (0, 0), (0, case.J - indices.shape[-1]))
        indices = np.pad(indices, widths, constant_values=-1)
        x = x | {"indices": jnp.asarray(indices)}
        mask = (indices[..., None] == np.arange(case.T)).any(2)
    q, rows = (
        np.concatenate([np.asarray(x[name], np.float64) for name in names], -1)
        for names in (("q_latent", "q_rope"), ("latent", "k_rope"))
    )
    z = case.options()["scale"] * np.einsum("btnk,bsk->btns", q, rows)
    z = np.where(mask[:, :, None], z, -np.inf)
    top = np.where(mask.any(-1)[..., None], z.max(-1), 0)
    total = np.exp(z - top[..., None]).sum(-1)
    lse = np.where(total > 0, top + np.log(np.maximum(total, 1e-300)), NO_KEY_LSE)
    return x | {"lse": jnp.asarray(lse.astype(np.float32))}


CASES = {
    "one": Case(2, 1, 2, 8, 4, 3, 4, 1),
    "one_dense": Case(2, 1, 2, 8, 4, 3, 4, None),
    "odd63": Case(2, 63, 2, 8, 4, 3, 4, 7, starts=(40,)),
    "odd65_dense": Case(2, 65, 2, 8, 4, 3, 4, None, starts=(1, 33), padding=7),
    "more_than_all": Case(1, 63, 2, 8, 4, 3, 4, 80, padding=2),
    "three_blocks": Case(1, 170, 2, 8, 4, 3, 4, 9, starts=(80,), padding=1),
    "three_blocks_dense": Case(1, 170, 2, 8, 4, 3, 4, None, starts=(80,)),
}
LARGE = Case(1, 1024, 4, 16, 8, 4, 16, 8)
LARGE_DENSE = dataclasses.replace(LARGE, J=None)
# Heads of the main attention, 512 | 64 wide, and of the indexer, 128 wide; both choose 2048 keys.
MODELS = {"K3.1": (96, 32), "DeepSeek-V3.2": (128, 64)}


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: the loss and its gradients in both stages, rows of 8, 32 and 128 K."""
    cases = []
    for model, (num_main, num_index) in MODELS.items():
        for length in (8192, 32768, 131072):
            for stage in ("sparse", "dense"):
                name = f"indexer_kl {stage} {model} {length // 1024} K"
                top_k = 2048 if stage == "sparse" else None
                quick = (model, length) == ("K3.1", 8192)
                cases.append(_gate_case(name, num_main, num_index, length, top_k, platform, quick))
    return cases


def _gate_case(name, num_main, num_index, length, top_k, platform, quick) -> GateCase:
    xla = platform == "tpu" and top_k is not None  # no kernel fetches chosen rows there
    impl = "chunked" if xla else f"pallas_{platform}"

    def loss(q_idx, k_idx, w_idx, *rest):
        named = dict(zip(names, rest, strict=True))
        return indexer_kl(q_idx, k_idx, w_idx, **named, scale=192**-0.5, impl=impl).sum()

    shape, low = jax.ShapeDtypeStruct, jnp.bfloat16
    index = (
        shape((1, length, num_index, 128), low), shape((1, length, 128), low),
        shape((1, length, num_index), jnp.float32),
    )  # fmt: skip
    rest = {
        "q_latent": shape((1, length, num_main, 512), low),
        "q_rope": shape((1, length, num_main, 64), low),
        "latent": shape((1, length, 512), low), "k_rope": shape((1, length, 64), low),
        "lse": shape((1, length, num_main), jnp.float32),
        "segment_ids": shape((1, length), jnp.int32),
    }  # fmt: skip
    if top_k is not None:
        rest["indices"] = shape((1, length, top_k), jnp.int32)
    names = tuple(rest)
    bound = ("indexer_kl_target",) if top_k is not None else ("indexer_kl_dense", "index_scores")
    both = jax.value_and_grad(loss, argnums=(0, 1, 2))
    return GateCase(name, both, (*index, *rest.values()), bound, quick and not xla, xla)
