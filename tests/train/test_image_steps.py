"""Steps on rows with images: one program for all sizes, the same gradients on any mesh."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moejax.config import (
    ConfigError,
    DataConfig,
    FfnConfig,
    MeshConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    VisionConfig,
)
from moejax.data.image_rows import ImageRoom
from moejax.data.packing import next_token_labels
from moejax.data.patches import patched
from moejax.layers.vision.images import images_of, with_features
from moejax.partitioning import BATCH_AXES
from moejax.train import step
from moejax.train.compile import compile_once
from moejax.train.evaluate import put_batch
from moejax.train.state import build_program, init_state
from tests.sharded.meshes import FSDP2_EXPERT4, FSDP8, ONE, assert_leaves_agree, mesh_of

B, T, Z, P, PAD = 8, 24, 32, 4, 63
FAST_COMPILE = {"xla_backend_optimization_level": 0}
MODEL = ModelConfig(
    vocab_size=64, dim=32, num_layers=1, attention="mla", last_attention="", attn_res_block=0,
    norm_eps=1e-2, init_std=0.1,
    mla=MlaConfig(num_heads=2, q_latent=16, kv_latent=16, nope_dim=8, rope_dim=4, value_dim=8),
    ffn=FfnConfig(dim=48, num_dense_layers=1), moe=MoeConfig(num_experts=8),
    vision=VisionConfig(
        num_layers=2, dim=24, num_heads=2, head_dim=8, mlp_dim=32, patch=P, grid=4, pad_token=PAD
    ),
)  # fmt: skip


def program_of(sizes: dict, **train):
    cfg = RunConfig(
        mesh=MeshConfig(**sizes), model=MODEL,
        data=DataConfig(seq_len=T, batch_size=B, image_patches=Z),
        optim=OptimConfig(warmup_fraction=0.0, schedule="constant"),
        train=TrainConfig(num_steps=10, **train),
    )  # fmt: skip
    return build_program(cfg, mesh_of(sizes))


def rows(grids: list[list[tuple[int, int]]], seed: int = 0) -> dict[str, np.ndarray]:
    """A batch whose row r has images of these rows and columns of patches, behind some text."""
    rng, room, made = np.random.default_rng(seed), ImageRoom(Z, P), []
    for sizes in grids:
        images = [
            patched(rng.integers(0, 256, (1, h * P, w * P, 3), dtype=np.uint8), P) for h, w in sizes
        ]
        tokens = rng.integers(0, PAD, T).astype(np.int32)
        at = int(rng.integers(1, 5))
        for image in images:
            tokens[at : at + image.num_tokens] = PAD
            at += image.num_tokens + 1
        segments = np.ones(T, np.int32)
        labels = next_token_labels(tokens, segments)
        labels = np.where(labels == PAD, -100, labels)
        row = {"tokens": tokens, "segment_ids": segments, "labels": labels}
        made.append(row | room.filled(tokens, PAD, images))
    return {name: np.stack([row[name] for row in made]) for name in made[0]}


# Four of eight devices hold no image; one has three.
SOME = [[(2, 2), (4, 2), (2, 6)], [], [(4, 4)], [], [], [(2, 2)], [(6, 4)], []]


@functools.cache
def gradients_on(mesh_items: tuple, accumulation: int = 1):
    """batch -> gradients and loss on a mesh, always of the same weights."""
    program = program_of(dict(mesh_items), accumulation=accumulation)
    fn = jax.jit(lambda s, b: step.gradients(program, s, b), compiler_options=FAST_COMPILE)
    state = jax.device_put(first_state(), program.shardings)

    def run(batch: dict):
        with jax.set_mesh(program.mesh):
            grads, measured = fn(state, put_batch(program, batch, accumulation))
        return jax.device_get(grads), float(measured["loss"])

    return run


@functools.cache
def first_state():
    return jax.device_get(init_state(program_of(ONE), 3))


def items(sizes: dict) -> tuple:
    return tuple(sizes.items())


@pytest.fixture(scope="module")
def alone():
    return gradients_on(items(ONE))(rows(SOME))


def test_the_tower_learns_and_what_is_no_image_does_not_reach_it(alone):
    grads, _ = alone
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads["vision"]):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)
    # Whatever stands in the padding of the buffers, and the pads' own embedding, changes nothing.
    batch = rows(SOME)
    batch["pixels"][batch["image_ids"] == 0] = 255
    batch["places"][batch["image_ids"] == 0] = 1
    other, _ = gradients_on(items(ONE))(batch)
    assert_leaves_agree(other, grads, 1e-6)
    assert not grads["embed"]["table"][PAD].any()


@pytest.mark.parametrize(
    "sizes, accumulation",
    [
        (FSDP8, 1),
        pytest.param(FSDP2_EXPERT4, 1, marks=pytest.mark.slow),
        pytest.param(ONE, 4, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_device_where_some_hold_no_image(alone, sizes, accumulation):
    grads, loss = gradients_on(items(sizes), accumulation)(rows(SOME))
    np.testing.assert_allclose(loss, alone[1], rtol=1e-6)
    assert_leaves_agree(grads, alone[0], 1e-5)


def test_no_feature_leaves_its_device():
    """Rows have their images with them: placing features sends nothing, forward or backward."""
    mesh, batch = mesh_of(FSDP8), rows(SOME)
    x_BTD, features_BzD = (np.ones((B, n, 32), np.float32) for n in (T, Z // 4))
    rest = images_of(batch)

    def placed(x_BTD, features_BzD, images):
        return (with_features(x_BTD, features_BzD, images) ** 2).sum((1, 2))

    def run(x_BTD, features_BzD, images):
        out, pull = jax.vjp(lambda *args: placed(*args, images), x_BTD, features_BzD)
        return pull(out)

    where = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    with jax.set_mesh(mesh):
        given = jax.device_put((x_BTD, features_BzD, rest), where)
        text = jax.jit(run).lower(*given).compile().as_text()
    # The transpose of shard_map sums over groups of one device each, which is nothing.
    alone = "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    sent = [line for line in text.splitlines() if any(f" {kind}(" in line for kind in kinds)]
    assert all(alone in line for line in sent), sent


def test_fifty_batches_of_random_sizes_are_one_program():
    program = program_of(ONE)
    state, losses, compiled = init_state(program, 0), [], None
    rng = np.random.default_rng(1)
    with jax.set_mesh(program.mesh):
        for number in range(50):
            grids = [
                [tuple(2 * rng.integers(1, 3, 2)) for _ in range(rng.integers(0, 3))]
                for _ in range(B)
            ]
            batch = put_batch(program, rows(grids, number), 1)
            if compiled is None:
                compiled = compile_once(
                    lambda s, b: step.train_step(program, s, b), state, batch, donate_argnums=0,
                    out_shardings=(program.shardings, None), compiler_options=FAST_COMPILE,
                )  # fmt: skip
            state, metrics = compiled.call(state, batch)
            losses.append(float(metrics["loss"]))
    assert compiled.traces == [1] and np.isfinite(losses).all()


def test_rows_with_images_need_a_tower():
    blind = MODEL.replace(vision=VisionConfig())
    with pytest.raises(ConfigError, match="image_patches=32 has no effect"):
        RunConfig(model=blind, data=DataConfig(image_patches=32, tokenizer="a file")).check(1)
    with pytest.raises(ConfigError, match=r"image_patches=30 .* Use 28 or 32"):
        DataConfig(image_patches=30)
