"""Images inside the text: published logits, losses and gradients, and who sees what."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig
from moejax.data.patches import feature_places
from moejax.layers.vision.images import Images
from moejax.models.decoder import by_layer
from moejax.models.parts import model_parts
from moejax.partitioning import BATCH_AXES, make_mesh, shardings_for
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
        features = None if grads else bound.vision(rows["images"].patches, dtype=jnp.float32)
        return loss, (logits, features, by_layer(aux, parts.segments, "ids"))

    fn = jax.value_and_grad(objective, has_aux=True) if grads else objective
    return jax.jit(fn, compiler_options=FAST_COMPILE)


def close(features: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.max(np.abs(features - want)) <= 1e-4 * np.max(np.abs(want)))


@functools.cache
def result(name: str, grads: bool = True):
    """One published row with its images: loss, logits, features, experts and gradients."""
    case, (params, balance) = published.cases(name), published.trees(name)
    parts = model(name)
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
    seen = None if grads else of_images(features, images, starts)
    return loss, np.asarray(logits), seen, np.asarray(ids), d_params


def close_gradients(grads: dict, want: dict) -> None:
    """Each within 1e-3 of its own length."""
    for (path, w), g in zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(grads), strict=True
    ):
        distance, norm = np.linalg.norm(g - w), np.linalg.norm(w)
        assert distance <= 1e-3 * max(norm, 1e-5), (jax.tree_util.keystr(path), distance, norm)


def same_experts(ids_XTA: np.ndarray, end: str) -> None:
    for place, layer in enumerate(range(1, 6)):
        want = published.cases("k3_multimodal")[f"router_idx_{layer}{end}"]
        np.testing.assert_array_equal(np.sort(ids_XTA[place], -1), np.sort(want, -1))


def test_k3_is_the_published_code():
    """With the epsilon of the tower's norms that float32 has there."""
    loss, logits, features, ids, _ = result("k3_multimodal", grads=False)
    case = published.cases("k3_multimodal")
    assert np.max(np.abs(logits - case["logits_eps_f32"])) <= 3e-4
    np.testing.assert_allclose(loss, case["loss_eps_f32"], rtol=1e-5)
    assert close(features, case["image_features_eps_f32"])
    same_experts(ids[:, 0], "_eps_f32")


def test_k25_is_the_published_code_with_images_and_a_clip():
    loss, logits, _, _, grads = result("kimi_k25")
    case = published.cases("kimi_k25")
    assert np.max(np.abs(logits - case["logits"])) <= 2e-4
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    close_gradients(grads, published.trees("kimi_k25", "grads")[0])


@functools.cache
def k3_rows(num_devices: int):
    """Eight rows: the published one is the sixth; the third has its text and its first image, but
    another second one. The others are text. All images lie with the first three rows.
    """
    name = "k3_multimodal"
    case, (params, balance) = published.cases(name), published.trees(name)
    images = split_rows(case["pixel_values"], case["image_grid_thw"])
    other = images[1]._replace(pixels=images[1].pixels[::-1])
    tokens = np.random.default_rng(0).integers(0, 90, (8, case["input_ids"].shape[1]))
    labels = np.full(tokens.shape, -100)
    tokens[2] = tokens[5] = case["input_ids"][0]
    labels[5] = case["labels"][0]
    parts = model(name, norm_eps=2.0**-7)
    rows = batch(tokens, labels, [images[0], other, *images], num_buffers=8, size=48)
    del rows["starts"]
    assert (rows["images"].patches.image_ids.max(1) > 0).sum() == 3
    context = contextlib.nullcontext()
    if num_devices > 1:
        mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
        params = jax.device_put(params, shardings_for(parts.infos, parts.params, mesh))
        rows = jax.device_put(rows, NamedSharding(mesh, P(BATCH_AXES)))
        context = jax.set_mesh(mesh)
    with context, jax.default_matmul_precision("highest"), recorded_choices():
        (loss, (logits, _, ids)), grads = program(parts, grads=True)(params, balance, rows)
    return loss, np.asarray(logits), np.asarray(ids), grads


@pytest.mark.parametrize("num_devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_k3_gradients_are_the_published_codes_wherever_images_lie(num_devices):
    """On eight devices none of the published row's images is where the row is."""
    loss, logits, ids, grads = k3_rows(num_devices)
    case = published.cases("k3_multimodal")
    assert np.max(np.abs(logits[5] - case["logits"][0])) <= 3e-4
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    same_experts(ids[:, 5], "")
    want, _ = published.trees("k3_multimodal", "grads")
    close_gradients(grads["vision"], want["vision"])
    close_gradients(grads["embed"], want["embed"])


def test_text_before_an_image_does_not_see_it():
    _, logits, *_ = k3_rows(1)
    pads = np.flatnonzero(published.cases("k3_multimodal")["input_ids"][0] == PAD)
    second = pads[6]
    assert np.max(np.abs(logits[2, :second] - logits[5, :second])) <= 1e-5
    assert np.max(np.abs(logits[2, second:] - logits[5, second:])) > 0.1


def test_text_alone_is_the_program_of_a_model_without_a_tower():
    cfg = published.config("k3_multimodal")

    def lowered(parts) -> str:
        def hidden(params, balance, tokens):
            return parts.bind(params, balance)(tokens)[0]

        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        return jax.jit(hidden).lower(parts.params, parts.balance, tokens).as_text()

    plain = cfg.replace(vision=cfg.vision.replace(num_layers=0))
    assert lowered(model_parts(cfg)) == lowered(model_parts(plain))
