"""The vision tower: published numbers, counts, and what must not depend on what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.checkpoint.key_map import KeyMap
from moejax.config import ModelConfig, VisionConfig
from moejax.config.load import load_config
from moejax.data.patches import PatchedImage, patched
from moejax.layers.vision.positions import turned, turns
from moejax.layers.vision.tower import VisionTower
from moejax.models.hf_keys import KIMI_K3
from moejax.models.parts import count_by_part, model_parts
from tests.models.published import cases
from tests.models.running import FAST_COMPILE
from tests.models.vision_cases import in_buffers, of_images, split_rows, tower_parts, tower_tree


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


def test_k3_has_its_published_size():
    vision = load_config("kimi_k31_vision").model.vision
    parts = model_parts(ModelConfig(dim=7168, num_layers=1, vocab_size=163840, vision=vision))
    counts = count_by_part(parts)
    assert counts["vision tower"] == 401_214_464
    assert counts["image projector"] == 4096 * 4096 + 4096 * 7168 + 7168


def test_k3_has_its_published_tensors():
    vision = load_config("kimi_k31_vision").model.vision.replace(pad_token=0)
    keys = KeyMap(model_parts(ModelConfig(dim=7168, num_layers=1, vision=vision)), KIMI_K3)
    own = [name for name in keys.entries if name.startswith(("vision_tower.", "mm_projector."))]
    assert len(own) == 168
    assert keys.entries["vision_tower.encoder.blocks.26.wqkv.weight"].shape == (4608, 1024)
    assert keys.entries["mm_projector.proj.2.weight"].shape == (7168, 4096)


def test_bfloat16_features_are_close():
    """The epsilon of 2^-7 hides nothing: sums are float32."""
    parts = tower_parts(norm_eps=2.0**-7)
    _, images, _, _, _, _ = k3_oracle()
    patches, starts = in_buffers(images, clips=True)
    run = jax.jit(
        lambda tree, patches: bound(parts, tree)(patches, dtype=jnp.bfloat16),
        compiler_options=FAST_COMPILE,
    )
    got = run(tower_tree(parts), patches)
    assert got.dtype == jnp.bfloat16
    got = of_images(np.asarray(got, np.float32), images, starts)
    assert error(got, cases("k3_vision")["projected"]) <= 3e-2


def test_a_model_without_a_tower_has_no_parameters_of_one():
    plain = model_parts(ModelConfig())
    assert "vision" not in plain.params
    assert not {"vision tower", "image projector"} & count_by_part(plain).keys()


TOY = VisionConfig(num_layers=2, dim=24, num_heads=2, head_dim=12, mlp_dim=32, patch=4, grid=5)


@functools.cache
def toy():
    """A tower with lively weights, and its features of any buffers."""
    parts = model_parts(ModelConfig(dim=32, num_layers=1, vision=TOY))
    rng = np.random.default_rng(0)
    tree = jax.tree.map(
        lambda leaf: (0.3 * rng.standard_normal(leaf.shape)).astype(np.float32),
        parts.params["vision"],
    )
    run = jax.jit(
        lambda tree, patches: bound(parts, tree)(patches, dtype=jnp.float32),
        compiler_options=FAST_COMPILE,
    )
    return tree, run


def features(images: list[PatchedImage], **options) -> list[np.ndarray]:
    """Of each image, from the buffers they are packed into."""
    tree, run = toy()
    patches, starts = in_buffers(images, **options)
    flat = np.asarray(run(tree, patches)).reshape(-1, 32)
    spans = zip(images, starts, strict=True)
    return [flat[start : start + image.num_tokens] for image, start in spans]


def random_image(rng, rows: int, columns: int, frames: int = 1) -> PatchedImage:
    shape = (frames, 8 * rows, 8 * columns, 3)
    return patched(rng.integers(0, 256, shape, np.uint8), 4)


BUFFERS = {"num_buffers": 2, "size": 96}


def test_images_of_one_buffer_do_not_see_each_other():
    rng = np.random.default_rng(1)
    sizes = [(2, 3), (1, 1), (4, 2), (1, 5), (3, 3)]
    images = [random_image(rng, *size) for size in sizes]
    together = features(images, **BUFFERS)
    for image, got in zip(images, together, strict=True):
        assert error(got, features([image], **BUFFERS)[0]) <= 1e-5
    changed = [random_image(rng, *sizes[0]), *images[1:]]
    again = features(changed, **BUFFERS)
    assert error(again[0], together[0]) > 0.1
    for got, want in zip(again[1:], together[1:], strict=True):
        np.testing.assert_array_equal(got, want)


def test_padding_reaches_nothing():
    tree, run = toy()
    images = [random_image(np.random.default_rng(2), 2, 3)]
    patches, (start,) = in_buffers(images, **BUFFERS)
    want = np.asarray(run(tree, patches)).reshape(-1, 32)[start : start + 6]
    dirty = np.where(patches.image_ids[..., None, None, None] == 0, 255, patches.pixels)
    got = np.asarray(run(tree, patches._replace(pixels=dirty)))
    np.testing.assert_array_equal(got.reshape(-1, 32)[start : start + 6], want)
    assert np.isfinite(got).all()


def test_equal_frames_are_not_a_still_image_but_as_many_tokens():
    image = random_image(np.random.default_rng(3), 2, 2)
    clip = PatchedImage(np.concatenate([image.pixels] * 2), (2, 4, 4))
    still, twice = features([image, clip], clips=True, **BUFFERS)
    assert still.shape == twice.shape and error(twice, still) > 1e-3
    (alone,) = features([image], **BUFFERS)
    assert error(still, alone) <= 1e-5  # whatever the buffers say of frames


def test_scores_depend_on_differences_of_rows_and_of_columns():
    rng = np.random.default_rng(4)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 12)), jnp.float32) for _ in "qk")

    def score(at_q, at_k):
        one, other = (
            turned(x, turns(jnp.array([[[*at, 9, 9]]], jnp.int32), 12))
            for x, at in ((q, at_q), (k, at_k))
        )
        return float(jnp.sum(one * other))

    base = score((2, 5), (4, 1))
    np.testing.assert_allclose(score((7, 10), (9, 6)), base, atol=1e-5)
    assert abs(score((2, 6), (4, 1)) - base) > 1e-3 and abs(score((3, 5), (4, 1)) - base) > 1e-3


def test_any_sizes_are_one_program():
    """Fifty batches of random images, some empty, compile once."""
    tree, _ = toy()
    parts = model_parts(ModelConfig(dim=32, num_layers=1, vision=TOY))
    traced = []

    def loss(tree, patches):
        traced.append(patches)
        return jnp.sum(jnp.square(bound(parts, tree)(patches, dtype=jnp.float32)))

    step = jax.jit(jax.grad(loss), compiler_options=FAST_COMPILE)
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(50):
        sizes = rng.integers(1, 4, (rng.integers(0, 4), 2)).tolist()
        seen.update(map(tuple, sizes))
        images = [random_image(rng, *size) for size in sizes]
        patches, _ = in_buffers(images, num_buffers=2, size=64, dtype=np.uint8)
        grads = step(tree, patches)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert len(seen) == 9 and len(traced) == 1
