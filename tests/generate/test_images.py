"""Prompts with images are continued as the whole model continues them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from moejax.config import (
    ConfigError,
    FfnConfig,
    MeshConfig,
    MlaConfig,
    ModelConfig,
    VisionConfig,
)
from moejax.data import ByteTokenizer
from moejax.data.image_rows import row_buffers
from moejax.data.patches import patched
from moejax.generate import Generator, LanguageModel
from moejax.generate.prompts import image_prompt
from moejax.layers.vision.images import images_of
from moejax.models.parts import model_parts
from moejax.partitioning import make_mesh
from tests.models.running import FAST_COMPILE

PAD, P, Z = 300, 4, 64
MODEL = ModelConfig(
    vocab_size=301, dim=32, num_layers=1, attention="mla", last_attention="", init_std=0.2,
    attn_res_block=0,
    mla=MlaConfig(num_heads=2, q_latent=16, kv_latent=16, nope_dim=8, rope_dim=4, value_dim=8),
    ffn=FfnConfig(dim=48, num_dense_layers=1),
    vision=VisionConfig(
        num_layers=1, dim=16, num_heads=2, head_dim=8, mlp_dim=32, patch=P, grid=4, pad_token=PAD
    ),
)  # fmt: skip


def picture(height: int, width: int, seed: int):
    pixels = np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), np.uint8)
    return patched(pixels, P)


IMAGES = [[picture(8, 16, 0), picture(16, 8, 1)], [], [picture(16, 16, 2)]]
PROMPTS = [[7, PAD, PAD, 9, PAD, PAD, 3], [1, 2, 3, 4], [PAD] * 4]


@pytest.fixture(scope="module")
def model():
    parts = model_parts(MODEL)
    params, balance = jax.jit(parts.init, compiler_options=FAST_COMPILE)(jax.random.key(0))
    return parts, params, balance


def test_tokens_are_those_of_the_whole_model(model):
    parts, params, balance = model
    generator = Generator(parts)
    generator.compiler_options = FAST_COMPILE
    got = generator.generate(params, balance, PROMPTS, max_new_tokens=4, images=IMAGES)

    @jax.jit
    def whole(tokens_BT, images):
        bound = parts.bind(params, balance)
        return bound.logits(bound(tokens_BT, images=images)[0])

    for prompt, own, tokens in zip(PROMPTS, IMAGES, got, strict=True):
        row = np.array([*prompt, *tokens, *[0] * (12 - len(prompt) - len(tokens))], np.int32)
        laid = {k: v[None] for k, v in row_buffers(row, PAD, own, Z, P).items()}
        logits = whole(jnp.asarray(row[None]), images_of(laid))[0]
        for place, token in enumerate(tokens, len(prompt)):
            assert int(jnp.argmax(logits[place - 1])) == token
    alone = generator.generate(params, balance, PROMPTS[:1], max_new_tokens=4, images=IMAGES[:1])
    assert alone == got[:1]
    other = [[picture(8, 16, 7), picture(16, 8, 8)]]
    assert generator.generate(params, balance, PROMPTS[:1], max_new_tokens=4, images=other) != alone


def test_what_does_not_fit_is_said(model):
    parts, params, balance = model
    generator = Generator(parts)

    def run(prompts, images):
        return generator.generate(params, balance, prompts, max_new_tokens=1, images=images)

    with pytest.raises(ConfigError, match="images are of 1 prompts, and 3"):
        run(PROMPTS, IMAGES[:1])
    with pytest.raises(ConfigError, match=r"prompt 0: 1 pad .* for 4 .* of its image \(4\)"):
        run([[PAD]], [[IMAGES[2][0]]])
    with pytest.raises(ConfigError, match=r"prompt 1: 3 pad .* for 0 .* of images: it has none"):
        run([[1], [PAD] * 3], None)
    seen = LanguageModel(parts, params, balance, make_mesh(MeshConfig()))
    for ask in (seen.logits, seen.loss):
        with pytest.raises(ConfigError, match=f"pad token of images, {PAD}, in row 1"):
            ask([[1, 2], [3, PAD]])
    blind = dataclasses.replace(MODEL, vision=VisionConfig())
    with pytest.raises(ConfigError, match="no vision tower"):
        Generator(model_parts(blind)).generate({}, {}, [[1]], max_new_tokens=1, images=[[0]])


def test_a_prompt_with_images_in_front(tmp_path):
    file = str(tmp_path / "x.png")
    Image.fromarray(np.zeros((16, 8, 3), np.uint8)).save(file)
    ids, images = image_prompt(ByteTokenizer(), "a", [file, file], MODEL.vision)
    assert ids == [PAD, PAD, PAD, PAD, ord("a")] and len(images) == 2
    assert image_prompt(ByteTokenizer(), "a", [], MODEL.vision) == ([ord("a")], [])
    with pytest.raises(ConfigError, match="no vision tower"):
        image_prompt(ByteTokenizer(), "a", [file], VisionConfig())
    with pytest.raises(ConfigError, match="none.png: cannot be read"):
        image_prompt(ByteTokenizer(), "a", [str(tmp_path / "none.png")], MODEL.vision)
