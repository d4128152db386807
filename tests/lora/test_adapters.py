"""What an adapter does to a model: nothing at first, what its merge does later, dropout apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.config import ConfigError
from moejax.layers.adapter import Adapter, AdapterSpec, Drop
from moejax.models.parts import model_parts
from tests.lora.adapting import EVERYWHERE, EXPERTS, adapted, lively_adapters, merged
from tests.models.running import FAST_COMPILE, filled
from tests.models.small_configs import small

# Between them every kind of map: low-rank and full gates, queries from a latent and from x,
# gates by element and by head, latent experts and plain ones.
MODELS = {
    "k3": small("kda,dsa", 4, dsa={"stage": "frozen"}),
    "linear": small(
        "kda,mla", 3, attn_res_block=0, kda={"output_gate": "full", "decay_rank": 0},
        mla={"q_latent": 0, "output_gate": "head"}, moe={"latent_dim": 0},
    ),
}  # fmt: skip
ALL = {"target_regex": EVERYWHERE, "target_parameters": EXPERTS}


def rows(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50, (2, 21), dtype=np.int32)
    segment_ids = 1 + (np.arange(21) >= np.array([[8], [13]])).astype(np.int32)
    return {"tokens": tokens, "segment_ids": segment_ids}


def fresh(parts) -> tuple[dict, dict]:
    return jax.jit(parts.init, compiler_options=FAST_COMPILE)(jax.random.key(0))


def logits(parts, params, balance, dtype=jnp.float32, **options) -> np.ndarray:
    def run(params, balance):
        model, batch = parts.bind(params, balance), jax.tree.map(jnp.asarray, rows())
        hidden, _ = model(batch["tokens"], batch["segment_ids"], dtype=dtype, **options)
        return model.logits(hidden)

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(run, compiler_options=FAST_COMPILE)(params, balance))


@pytest.mark.parametrize("shared_a", [False, True], ids=["own-a", "shared-a"])
@pytest.mark.parametrize("name", MODELS)
def test_merged_equals_adapted(name, shared_a):
    """Every map of the model at once, against W + scale A B added up elsewhere."""
    parts = adapted(MODELS[name], **ALL, shared_a=shared_a, alpha=2.0)
    params, balance = lively_adapters(parts)
    base = model_parts(parts.cfg)
    folded = merged(parts, params)
    assert jax.tree.structure(folded) == jax.tree.structure(base.params)
    with jax.enable_x64(True):
        want = logits(base, folded, balance, jnp.float64)
        got = logits(parts, params, balance, jnp.float64)
    np.testing.assert_allclose(got, want, atol=1e-9 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_fresh_adapter_changes_no_bit(name):
    parts = adapted(MODELS[name], **ALL)
    base, (params, balance) = model_parts(parts.cfg), fresh(parts)
    plain, _ = fresh(base)
    for mine, theirs in zip(
        jax.tree.leaves(merged(parts, params)), jax.tree.leaves(plain), strict=True
    ):
        np.testing.assert_array_equal(mine, np.asarray(theirs, np.float64))
    np.testing.assert_array_equal(logits(parts, params, balance), logits(base, plain, balance))


@pytest.mark.parametrize(("init", "size"), [("default", 32**-0.5 / 3**0.5), ("gaussian", 1 / 3)])
def test_first_values_are_pefts(init, size):
    parts = adapted(MODELS["k3"], targets=("q_proj", "o_proj"), init=init)
    params, _ = fresh(parts)
    pair = params["stack0"]["run0"]["attn"]["lora"]["q_proj"]
    assert not np.any(pair["b"])
    assert np.std(pair["a"]) == pytest.approx(size, rel=0.2)
    if init == "default":
        assert np.abs(pair["a"]).max() <= 32**-0.5


def test_smaller_ranks_and_unchosen_layers_are_zeros():
    model = small("kda,kda,kda,mla", 4)
    fields = {"rank_pattern": ("1.self_attn.q_proj=1",), "alpha_pattern": ("1.self_attn.q_proj=1",)}
    parts = adapted(
        model, target_regex=r".*layers\.[01]\.self_attn\.q_proj", alpha=3.0, **fields
    )  # fmt: skip
    params, _ = fresh(parts)
    found = [
        (spec, params[f"stack{s}"][f"run{r}"]["attn"]["lora"]["q_proj"]["a"])
        for s, runs in enumerate(parts.options["adapters"])
        for r, specs in enumerate(runs)
        for spec in specs
    ]
    for spec, a in found:
        for repeat, ranks in enumerate(spec.ranks):
            for i, rank in enumerate(ranks):
                assert np.count_nonzero(np.abs(a[repeat, i]).sum(0)) == rank


def test_dropout_acts_on_adapters_alone_and_only_in_training():
    parts = adapted(MODELS["k3"], targets=("q_proj", "down_proj"), dropout=0.5)
    params, balance = lively_adapters(parts)
    key = jax.random.key(1)
    still = logits(parts, params, balance)
    np.testing.assert_array_equal(still, logits(adapted(
        MODELS["k3"], targets=("q_proj", "down_proj")), params, balance))  # fmt: skip
    one = logits(parts, params, balance, dropout_key=key)
    assert np.abs(one - still).max() > 1e-3
    other = logits(parts, params, balance, dropout_key=jax.random.key(2))
    assert np.abs(one - other).max() > 1e-3


def test_dropout_keeps_the_mean():
    """Over many keys, a linear map's adapter gives on average what it gives without dropout."""
    spec = AdapterSpec(("attn",), "q_proj", ("q",), None, 2, 1.5, ((2,),))
    weight = nnx.Param(jnp.zeros((6, 4)), axes=("embed", None))
    adapter = filled(lambda: Adapter(spec, [weight], nnx.Rngs(0)), 1.0, 0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 6)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    mean = jax.vmap(lambda key: adapter(x, Drop(key, 0.25)))(keys).mean(0)
    np.testing.assert_allclose(mean, adapter(x, None), atol=0.15)


def test_absorbed_maps_refuse_dropout():
    with pytest.raises(ConfigError, match="absorbed attention reads the map itself"):
        adapted(MODELS["k3"], targets=("kv_b_proj",), dropout=0.1)
