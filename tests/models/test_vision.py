"""The vision tower: published numbers, counts, and what must not depend on what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.config import ModelConfig, VisionConfig
from moejax.layers.vision.tower import VisionTower
from moejax.models.parts import count_by_part, model_parts
from tests.models.published import cases
from tests.models.running import FAST_COMPILE
from tests.models.vision_cases import in_buffers, of_images, split_rows, tower_parts, tower_tree

K3 = VisionConfig(num_layers=27, dim=1024, num_heads=12, head_dim=128, mlp_dim=4096)


def bound(parts, tree: dict) -> VisionTower:
    """The tower with these arrays in it."""
    cfg = parts.cfg
    graph, _ = nnx.split(
        nnx.eval_shape(lambda: VisionTower(cfg.vision, cfg.dim, cfg.init_std, nnx.Rngs(params=0)))
    )
    return nnx.merge(graph, tree)


def error(got, want, floor: float = 1e-3) -> float:
    return float(np.max(np.abs(np.asarray(got) - want)) / max(np.max(np.abs(want)), floor))


@functools.cache
def k3_oracle():
    """Intermediate results and gradients of K3's tiny tower, in two buffers with a clip."""
    parts = tower_parts(norm_eps=2.0**-7)
    case, tree = cases("k3_vision"), tower_tree(parts)
    images = split_rows(case["pixel_values"], case["grid_thw"])
    patches, starts = in_buffers(images, num_buffers=2, size=76, clips=True)
    flat = of_images(np.arange(2 * 19)[:, None], images, starts)[:, 0]

    def objective(tree, pixels, patches):
        tower, patches = bound(parts, tree), patches._replace(pixels=pixels)
        embedded = tower.embed(patches, jnp.float32)
        merged = tower.merge(tower.encode(embedded, patches, "full"), patches)
        projected = tower.projector(merged)
        seen = projected.reshape(-1, 32)[flat]
        return jnp.sum(seen * case["cotangent"]), (embedded, merged, projected)

    with jax.default_matmul_precision("highest"):
        grad = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        run = jax.jit(grad, compiler_options=FAST_COMPILE)
        (_, values), grads = run(tree, patches.pixels, patches)
    return parts, images, patches, starts, values, grads


def test_k3_features_are_the_published_codes():
    _, images, patches, starts, (embedded, merged, projected), _ = k3_oracle()
    case = cases("k3_vision")
    want = split_rows(case["patch_embed_out"][:, :, None], case["grid_thw"])
    want = np.concatenate([image.pixels for image in want])[..., 0]
    inside = np.asarray(embedded)[patches.image_ids > 0]
    assert sorted(starts) == starts  # so that buffers hold the images in their order
    assert error(inside, want) <= 1e-5
    merged = merged.reshape(*merged.shape[:2], -1)
    assert error(of_images(merged, images, starts), case["merged"].reshape(19, -1)) <= 1e-4
    assert error(of_images(projected, images, starts), case["projected"]) <= 1e-4


def test_k3_gradients_are_the_published_codes():
    parts, _, patches, _, _, (d_tree, d_pixels) = k3_oracle()
    want = tower_tree(parts, file="grads")
    for (path, w), g in zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(d_tree), strict=True
    ):
        stacked = path[0].key == "blocks"
        pairs = zip(w, np.asarray(g), strict=True) if stacked else ((w, np.asarray(g)),)
        for one_w, one_g in pairs:
            distance, norm = np.linalg.norm(one_g - one_w), np.linalg.norm(one_w)
            assert distance <= 1e-3 * max(norm, 1e-5), (jax.tree_util.keystr(path), distance, norm)
    case = cases("k3_vision")
    want_pixels = split_rows(case["grad_pixel_values"], case["grid_thw"])
    inside = np.asarray(d_pixels)[patches.image_ids > 0]
    assert error(inside, np.concatenate([image.pixels for image in want_pixels])) <= 1e-3


@pytest.mark.parametrize("kind", ["image", "video"])
def test_k25_features_are_the_published_codes(kind):
    parts = tower_parts("kimi_k25")
    case, tree = cases("kimi_k25"), tower_tree(parts, "kimi_k25")
    pixels = case["pixel_values" if kind == "image" else "pixel_values_videos"]
    images = split_rows(pixels, case[f"{kind}_grid_thw"])
    patches, starts = in_buffers(images, clips=kind == "video")
    with jax.default_matmul_precision("highest"):
        run = jax.jit(
            lambda tree, patches: bound(parts, tree)(patches, dtype=jnp.float32),
            compiler_options=FAST_COMPILE,
        )
        features = run(tree, patches)
    assert error(of_images(features, images, starts), case[f"{kind}_projected"]) <= 1e-4


def test_k3_has_its_published_size():
    counts = count_by_part(model_parts(ModelConfig(dim=7168, num_layers=1, vision=K3)))
    assert counts["vision tower"] == 401_214_464
    assert counts["image projector"] == 4096 * 4096 + 4096 * 7168 + 7168


def test_a_model_without_a_tower_has_no_parameters_of_one():
    plain = model_parts(ModelConfig())
    assert "vision" not in plain.params
    assert not {"vision tower", "image projector"} & count_by_part(plain).keys()
