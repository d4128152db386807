"""Images inside the text: published logits, losses and gradients, and who sees what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.data.patches import feature_places
from moejax.layers.vision.images import Images
from moejax.models.decoder import by_layer
from moejax.models.parts import model_parts
from tests.models import published
from tests.models.running import FAST_COMPILE, plain_cross_entropy, recorded_choices
from tests.models.vision_cases import in_buffers, of_images, split_rows

PAD = 100


def model(name: str, **vision):
    """Parts of a checkpoint's model; `vision` changes its tower."""
    cfg = published.config(name)
    return model_parts(cfg.replace(vision=cfg.vision.replace(**vision)))


def batch(tokens_BT, labels_BT, images, **options) -> dict:
    """What a step gets: tokens, next-token labels, patches and where their features stand."""
    patches, starts = in_buffers(images, **options)
    feature_at = feature_places(tokens_BT, PAD, images, starts)
    labels = np.concatenate([labels_BT[:, 1:], np.full((len(labels_BT), 1), -100)], 1)
    return {
        "tokens": tokens_BT.astype(np.int32), "labels": labels.astype(np.int32),
        "images": Images(patches, feature_at), "starts": starts,
    }  # fmt: skip


def program(parts, *, grads: bool):
    """Loss with logits, features and chosen experts, or also the gradient; one compilation."""

    def objective(params, balance, rows):
        bound = parts.bind(params, balance)
        hidden, aux = bound(rows["tokens"], images=rows["images"], dtype=jnp.float32, remat="full")
        logits = bound.logits(hidden)
        loss = plain_cross_entropy(logits, rows["labels"]).sum() / (rows["labels"] >= 0).sum()
        features = bound.vision(rows["images"].patches, dtype=jnp.float32)
        return loss, (logits, features, by_layer(aux, parts.segments, "ids"))

    fn = jax.value_and_grad(objective, has_aux=True) if grads else objective
    return jax.jit(fn, compiler_options=FAST_COMPILE)


@functools.cache
def result(name: str, eps: float | None = None, grads: bool = True):
    """One published row with its images: loss, logits, features, experts and gradients."""
    case, (params, balance) = published.cases(name), published.trees(name)
    parts = model(name) if eps is None else model(name, norm_eps=eps)
    images = split_rows(case["pixel_values"], case["image_grid_thw"])
    tokens = case["input_ids"]
    if "video_grid_thw" in case:
        # Images and clips have pads of their own there; ours are told apart by their order.
        images += split_rows(case["pixel_values_videos"], case["video_grid_thw"])
        assert np.flatnonzero(tokens == 101).min() > np.flatnonzero(tokens == PAD).max()
        tokens = np.where(tokens == 101, PAD, tokens)
    rows = batch(tokens, case["labels"], images, clips=any(i.grid[0] > 1 for i in images))
    starts = rows.pop("starts")
    with jax.default_matmul_precision("highest"), recorded_choices():
        out = program(parts, grads=grads)(params, balance, rows)
    (loss, (logits, features, ids)), d_params = out if grads else (out, None)
    return loss, np.asarray(logits), of_images(features, images, starts), np.asarray(ids), d_params


CASES = pytest.mark.parametrize(
    ("name", "eps", "end"),
    [
        ("k3_multimodal", 2.0**-7, ""),
        ("k3_multimodal", 2.0**-23, "_eps_f32"),
        ("kimi_k25", None, ""),
    ],
)


@CASES
def test_logits_loss_and_features_are_the_published_codes(name, eps, end):
    loss, logits, features, ids, _ = result(name, eps, not end)
    case = published.cases(name)
    assert np.max(np.abs(logits - case[f"logits{end}"])) <= 3e-4
    np.testing.assert_allclose(loss, case[f"loss{end}"], rtol=1e-5)
    if name == "k3_multimodal":
        want = case[f"image_features{end}"]
        assert np.max(np.abs(features - want)) <= 1e-4 * np.max(np.abs(want))
        for place, layer in enumerate(range(1, 6)):
            want_ids = np.sort(case[f"router_idx_{layer}{end}"], -1)
            np.testing.assert_array_equal(np.sort(ids[place, 0], -1), want_ids)


@pytest.mark.parametrize(("name", "eps"), [("k3_multimodal", 2.0**-7), ("kimi_k25", None)])
def test_gradients_are_the_published_codes(name, eps):
    want, _ = published.trees(name, "grads")
    grads = result(name, eps)[-1]
    parts = [("vision",), ("embed",)] if name == "k3_multimodal" else [(key,) for key in want]
    for (part,) in parts:
        for (path, w), g in zip(
            jax.tree_util.tree_leaves_with_path(want[part]),
            jax.tree.leaves(grads[part]),
            strict=True,
        ):
            distance, norm = np.linalg.norm(g - w), np.linalg.norm(w)
            where = part + jax.tree_util.keystr(path)
            assert distance <= 1e-3 * max(norm, 1e-5), (where, distance, norm)
