"""How layers are grouped, numbered and scanned, and that a deep model lowers like a shallow one."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import kimi_k3
from moejax.config import ModelConfig, build_section
from moejax.layers.attn_res import AttnRes
from moejax.layers.ffn import Glu
from moejax.layers.kda import Kda
from moejax.models.block import DecoderLayer, num_sources, start_residual
from moejax.models.decoder import Decoder, by_layer, layer_kinds, layers_with
from moejax.models.grouping import LayerKind, Run, Segment, segments_of
from moejax.models.parts import model_parts
from tests.models.running import FAST_COMPILE, filled, forward, lively, row_of, stack_rows
from tests.models.small_configs import small

DENSE, KDA = LayerKind("kda", "dense"), LayerKind("kda", "moe")
MLA = LayerKind("mla", "moe")


def k3_like(num_layers: int, **options):
    """K3's layer pattern and switches at toy width."""
    return small("kda,kda,kda,mla", num_layers, last_attention="mla", attn_res_block=12, **options)


def test_the_93_layers_of_k3_are_five_bodies():
    want = (
        Segment(0, 1, (Run(DENSE, 1), Run(KDA, 2))),
        Segment(3, 22, (Run(MLA, 1), Run(KDA, 3))),
        Segment(91, 1, (Run(MLA, 2),)),
    )
    k3 = build_section(ModelConfig, kimi_k3.get_config().model.to_dict(), "model.")
    assert segments_of(layer_kinds(k3)) == want
    assert segments_of(layer_kinds(k3_like(93))) == want


def expanded(segments: tuple[Segment, ...]) -> list[LayerKind]:
    return [
        run.kind
        for segment in segments
        for _ in range(segment.repeats)
        for run in segment.runs
        for _ in range(run.count)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_grouping_keeps_every_layer_in_its_place(seed):
    rng = np.random.default_rng(seed)
    period = [[DENSE, KDA, MLA][i] for i in rng.integers(0, 3, rng.integers(1, 5))]
    kinds = [[DENSE, KDA, MLA][i] for i in rng.integers(0, 3, rng.integers(0, 3))]
    kinds = [*kinds, *period * rng.integers(1, 6), *period[: rng.integers(0, len(period))]]
    segments = segments_of(kinds)
    assert expanded(segments) == kinds
    first = 0
    for segment in segments:
        assert segment.first == first
        first += segment.repeats * segment.period
    assert sum(len(segment.runs) for segment in segments) <= len(kinds)


def test_values_of_layers_come_in_layer_order():
    cfg = small("kda,mla,mla", 11)
    segments = segments_of(layer_kinds(cfg))
    assert any(segment.repeats > 1 and len(segment.runs) > 1 for segment in segments)
    aux, of_kind = [], {"kda": [], "mla": []}
    for segment in segments:
        offset, runs = segment.first, []
        for run in segment.runs:
            starts = offset + segment.period * np.arange(segment.repeats)
            numbers = starts[:, None] + np.arange(run.count)
            of_kind[run.kind.attention] += list(numbers.ravel())
            runs.append({"all": jnp.asarray(numbers), run.kind.attention: jnp.asarray(numbers)})
            offset += run.count
        aux.append(runs)
    np.testing.assert_array_equal(by_layer(aux, segments, "all"), np.arange(11))
    for kind, numbers in of_kind.items():
        np.testing.assert_array_equal(by_layer(aux, segments, kind), sorted(numbers))
        assert layers_with(aux, segments, kind) == numbers
    assert by_layer(aux, segments, "none of them") is None


# ---- Attention Residuals: how many sources each sublayer reads


def test_sources_of_every_sublayer_of_k3(monkeypatch):
    """R7: 1 + ceil(i/12) at attention i >= 1, 2 + floor(i/12) at its FFN, 9 at the end."""
    cfg = k3_like(93)
    layer = filled(lambda: DecoderLayer(cfg, DENSE, nnx.Rngs(params=0)), 0.1, 0)
    zeros = jnp.zeros((1, 2, cfg.dim))
    monkeypatch.setattr(Kda, "__call__", lambda self, x, segment_ids, drop: (zeros, {}))
    monkeypatch.setattr(Glu, "__call__", lambda self, x, drop: zeros)
    seen = []
    monkeypatch.setattr(
        AttnRes, "__call__", lambda self, sources, count: (seen.append(int(count)), sources[0])[1]
    )
    residual = start_residual(zeros, num_sources(cfg.num_layers, cfg.attn_res_block))
    for i in range(93):
        residual, _ = layer(residual, jnp.ones((1, 2), jnp.int32), jnp.int32(i), None)
    assert seen[0::2] == [1, *(1 + -(-i // 12) for i in range(1, 93))]
    assert seen[1::2] == [2 + i // 12 for i in range(93)]
    assert int(residual.last) + 1 == num_sources(93, 12) == 9


def test_one_source_without_attention_residuals():
    """A block longer than the model leaves the embedding and the running sum (R5)."""
    assert num_sources(93, 0) == 1
    assert num_sources(5, 9) == 2


# ---- depth


def lowered(num_layers: int) -> tuple[int, float]:
    """Size of the HLO text of loss and gradient, and the best of two times to lower it."""
    parts = model_parts(k3_like(num_layers))
    shape = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    rows = {"tokens": shape, "segment_ids": shape, "labels": shape}
    seconds = []
    for _ in range(2):

        def objective(params, balance, rows):
            _, loss_B, measured = forward(parts, params, balance, rows, remat="full")
            return loss_B.sum(), measured

        started = time.perf_counter()
        program = jax.jit(jax.grad(objective, has_aux=True))
        text = program.lower(parts.params, parts.balance, rows).as_text()
        seconds.append(time.perf_counter() - started)
    return len(text), min(seconds)


def test_93_layers_lower_like_13():
    (shallow, shallow_s), (deep, deep_s) = lowered(13), lowered(93)
    print(f"HLO {deep / shallow:.2f}x, lowering {shallow_s:.2f} s and {deep_s:.2f} s")
    assert deep <= 2 * shallow
    assert deep_s <= 2 * shallow_s + 1  # the machine may be busy with other things


# ---- start


def test_initial_loss_is_the_predicted_one():
    """L2: the head's 0.02 on a hidden state of RMS 1 gives logits of variance 0.0004 D."""
    cfg = small("kda,mla", 2, vocab_size=512, dim=64)
    parts = model_parts(cfg)
    rng = np.random.default_rng(0)
    rows = stack_rows([row_of([rng.integers(0, 512, 64, dtype=np.int32)], 64) for _ in range(8)])

    def loss(key, rows):
        hidden_loss = forward(parts, *parts.init(key), rows)[1]
        return hidden_loss.sum() / (rows["labels"] >= 0).sum()

    got = jax.jit(loss, compiler_options=FAST_COMPILE)(jax.random.key(0), rows)
    np.testing.assert_allclose(got, np.log(512) + 64 * 0.0004 / 2, rtol=0.01)


def test_initial_values():
    """Normal maps of 0.02, norms of 1, depth queries and balancing biases of 0."""
    parts = model_parts(small("kda,kda,kda,mla", 4))
    params, balance = jax.jit(parts.init, compiler_options=FAST_COMPILE)(jax.random.key(1))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [part.key for part in path]
        if names[-1] == "query":
            assert not leaf.any()
        elif names[-1] in ("norm", "o_norm") or (names[-1] == "weight" and names[-2] != "router"):
            assert (leaf == 1).all(), names
        elif leaf.size > 400 and not names[-1].endswith(("_conv", "bias", "a_log")):
            # 5 standard errors of a standard deviation
            assert abs(float(jnp.std(leaf)) / 0.02 - 1) < 5 / np.sqrt(2 * leaf.size), names
    assert not any(leaf.any() for leaf in jax.tree.leaves(balance))
    maps = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 4 and leaf.shape[:2] == (1, 2)]
    assert maps  # two layers in one run
    for leaf in maps:
        assert not np.array_equal(leaf[0, 0], leaf[0, 1])  # each layer from a key of its own


# ---- dropout


def test_dropout_follows_its_key():
    parts, params, balance = lively(small("kda,mla", 2, dropout=0.5))
    rows = stack_rows([row_of([np.arange(20, dtype=np.int32)], 20)])

    def logits(params, balance, rows, key, remat):
        return forward(parts, params, balance, rows, dropout_key=key, remat=remat)[0]

    compiled = jax.jit(logits, static_argnames="remat", compiler_options=FAST_COMPILE)
    run = lambda key, remat: compiled(params, balance, rows, key, remat=remat)  # noqa: E731
    one, two = jax.random.key(1), jax.random.key(2)
    got = run(one, "none")
    np.testing.assert_array_equal(got, run(one, "none"))
    np.testing.assert_allclose(got, run(one, "full"), rtol=1e-5, atol=1e-5)
    other, off = run(two, "none"), run(None, "none")
    assert min(np.max(np.abs(got - other)), np.max(np.abs(got - off))) > 0.1


def test_dropout_keeps_the_mean_and_differs_by_sublayer():
    cfg = small("kda", 1, dropout=0.25)
    layer = filled(lambda: DecoderLayer(cfg, DENSE, nnx.Rngs(params=0)), 0.1, 0)
    ones = jnp.ones((4, 50, 32))
    first, second = (np.asarray(layer._drop(ones, jax.random.key(0), salt)) for salt in (0, 1))
    assert set(np.unique(first)) == {0.0, np.float32(1 / 0.75)}
    assert abs(first.mean() - 1) < 0.05
    assert not np.array_equal(first, second)


def test_default_arguments_are_one_document_in_float32():
    cfg = small("kda,mla", 2)
    parts, params, balance = lively(cfg)
    tokens = jnp.arange(12, dtype=jnp.int32)[None]

    def both(params, balance):
        model: Decoder = parts.bind(params, balance)
        return model(tokens)[0], model(tokens, jnp.ones_like(tokens), dtype=jnp.float32)[0]

    implied, given = jax.jit(both, compiler_options=FAST_COMPILE)(params, balance)
    assert implied.dtype == jnp.float32
    np.testing.assert_array_equal(implied, given)
