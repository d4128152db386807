"""`moejax.load` on published checkpoints: logits and losses as their own code computes them."""

import functools

import jax
import numpy as np
import pytest

from moejax.checkpoint.hf_import import import_hf
from moejax.config import ConfigError, MeshConfig
from moejax.generate.load import load
from moejax.generate.model import LanguageModel
from moejax.partitioning import make_mesh
from tests.models.published import FOLDER, cases
from tests.models.running import FAST_COMPILE

TOLERANCE = {"k3_text": 3e-4, "k3_mxfp4": 3e-4}  # max abs; 2e-4 elsewhere
NAMES = ("k3_text", "k3_mxfp4", "kimi_linear", "deepseek_v3", "deepseek_v32", "bailing_hybrid")
ALL = pytest.mark.parametrize("name", NAMES)


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@functools.cache
def model(name: str) -> LanguageModel:
    loaded = load(FOLDER / name, mesh=one_device())
    loaded.compiler_options = FAST_COMPILE
    return loaded


@functools.cache
def rows(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Case a, case b and both packed, as rows of 165 tokens with padding in front."""
    a, b = (cases(name)[f"{c}_input_ids"][0] for c in "ab")
    tokens, segments = np.zeros((3, 165), np.int32), np.zeros((3, 165), np.int32)
    tokens[0, 101:], tokens[1, 64:], tokens[2] = a, b, np.concatenate([a, b])
    segments[0, 101:], segments[1, 64:], segments[2] = 1, 1, np.repeat([1, 2], [64, 101])
    return tokens, segments


@functools.cache
def logits(name: str) -> np.ndarray:
    return np.asarray(model(name).logits(*rows(name)))


@ALL
def test_logits_are_the_published_codes(name):
    for case, row, where in (
        ("a", 0, slice(101, 165)), ("b", 1, slice(64, 165)),
        ("a", 2, slice(0, 64)), ("b", 2, slice(64, 165)),
    ):  # fmt: skip
        want = cases(name)[f"{case}_logits"][0]
        assert np.max(np.abs(logits(name)[row, where] - want)) <= TOLERANCE.get(name, 2e-4)


@ALL
def test_losses_are_the_published_codes(name):
    tokens, segments = (x[1:2, 64:] for x in rows(name))
    labels = cases(name)["b_labels"]
    full = np.concatenate([np.zeros((1, 64), np.int32), tokens], 1)
    padded = np.concatenate([np.full((1, 64), -100), labels], 1)
    spans = np.concatenate([np.zeros((1, 64), np.int32), segments], 1)
    three = [np.repeat(x, 3, 0) for x in (full, padded, spans)]  # the shape that is compiled
    want = cases(name)["b_loss"]
    np.testing.assert_allclose(model(name).loss(*three), want, rtol=2e-5)
    aligned = np.full_like(three[1], -100)
    aligned[:, :-1] = three[1][:, 1:]
    np.testing.assert_allclose(
        model(name).loss(three[0], aligned, three[2], aligned=True), want, rtol=2e-5
    )


def test_an_imported_checkpoint_is_the_folder_on_any_mesh(tmp_path):
    import_hf(FOLDER / "k3_text", tmp_path / "k3")
    there = load(tmp_path / "k3", mesh=MeshConfig(fsdp=2, expert=4))
    there.compiler_options = FAST_COMPILE
    got = np.asarray(there.logits(*rows("k3_text")))
    scale = np.max(np.abs(logits("k3_text")))
    assert np.max(np.abs(got - logits("k3_text"))) <= 3e-5 * scale
    assert there.config == model("k3_text").config


def test_positions_say_where_documents_begin():
    tokens, segments = (x[2:] for x in rows("deepseek_v3"))
    positions = np.concatenate([np.arange(64), np.arange(101)])[None]
    three = [np.repeat(x, 3, 0) for x in (tokens, segments, positions)]
    got = model("deepseek_v3").logits(three[0], positions=three[2])
    np.testing.assert_array_equal(got[0], logits("deepseek_v3")[2])
    both = model("deepseek_v3").logits(three[0], three[1], three[2])
    np.testing.assert_array_equal(got, both)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([[0, 500]],), "token_ids hold 500; tokens of this model are 0 to 127"),
        (([[0, -1]],), "token_ids hold -1"),
        (([[0.5]],), "must be whole numbers"),
        (([[1, 2**40]],), "token_ids hold 1099511627776: beyond 32 bits"),
        (([[1], [1, 2]],), "must be rows of one length"),
        (([[1, 2]], [[2, 1]]), "segment_ids must not fall"),
        (([[1, 2]], [[1]]), "segment_ids have shape"),
        (([[1, 2, 3]], None, [[0, 1, 3]]), "row 0 goes from 1 to 3 at token 2"),
    ],
)
def test_bad_tokens_are_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        model("deepseek_v3").logits(*arguments)


def test_labels_cross_no_border():
    losses, counted = model("deepseek_v3").token_losses(*(rows("deepseek_v3")[0], None))
    assert counted[:, :-1].all() and not counted[:, -1].any()
    _, counted = model("deepseek_v3").token_losses(
        rows("deepseek_v3")[0], None, rows("deepseek_v3")[1]
    )
    assert not counted[2, 63] and counted[2, 62] and not counted[0, :101].any()
    assert np.isfinite(losses).all()


def test_pinned_experts_are_the_ones_used():
    """Pinned to the reference's choice: the same logits; to others: other logits."""
    found, (tokens, segments) = model("deepseek_v3"), rows("deepseek_v3")
    top_k, layers = found.config.moe.top_k, found.config.num_layers
    pins = np.zeros((layers, 3, 165, top_k), np.int32)
    pins[:] = np.arange(top_k)
    for layer in range(1, layers):
        for case, row, start in (("a", 0, 101), ("b", 1, 64), ("a", 2, 0), ("b", 2, 64)):
            ids = cases("deepseek_v3")[f"{case}_router_idx_{layer}"]
            pins[layer, row, start : start + len(ids)] = ids
    got = np.asarray(found.logits(tokens, segments, pinned_experts=pins))
    real = segments > 0
    np.testing.assert_allclose(got[real], logits("deepseek_v3")[real], atol=2e-5)
    other = np.asarray(found.logits(tokens, segments, pinned_experts=pins[:, ::-1]))
    assert np.abs(other[real] - got[real]).max() > 1e-2
    with pytest.raises(ConfigError, match="pinned_experts have shape"):
        found.logits(tokens, segments, pinned_experts=pins[1:])


@pytest.mark.parametrize(
    "name", ["deepseek_v32", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[:4])]
)
def test_bfloat16_stays_near(name):
    """Not elementwise: routing flips. Other packages' own bfloat16 runs are as far away."""
    half = load(FOLDER / name, mesh=one_device(), compute_dtype="bfloat16")
    half.compiler_options = FAST_COMPILE
    tokens, segments = rows(name)
    got = np.asarray(half.logits(tokens, segments))
    for case, row, where in (("a", 0, slice(101, 165)), ("b", 1, slice(64, 165))):
        assert np.mean(np.abs(got[row, where] - cases(name)[f"{case}_logits"][0])) < 0.25
    labels = np.full((3, 165), -100)
    labels[1, 64:] = cases(name)["b_labels"]
    assert abs(half.loss(tokens, labels, segments) - cases(name)["b_loss"]) < 0.1
