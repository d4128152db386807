"""The vision tower and its projector: patches to embeddings of the text stream.

MoonViT-V2 (Kimi K3) and, by configuration, the tower of Kimi K2.5; architecture section 8.1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import VisionConfig
from moejax.config.vision import MERGE
from moejax.layers.adapter import AdapterSpec, attach, project
from moejax.layers.norm import RmsNorm, layer_norm
from moejax.layers.param import use, vector, weight, wide
from moejax.layers.vision.images import Patches
from moejax.layers.vision.positions import frame_vector, grid_positions, turned, turns
from moejax.memory.layer_loop import scan_layers
from moejax.memory.policy import Policy
from moejax.memory.policy import remat as remat_under
from moejax.partitioning import batch_local, constrain
from pallas_kernels.mla_attention import mla_attention


class LayerNorm(nnx.Module):
    """LayerNorm with weight and bias over the last dim."""

    def __init__(self, dim: int, eps: float):
        self.eps = eps
        self.weight, self.bias = vector(jnp.ones(dim), (None,)), vector(jnp.zeros(dim), (None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        full = wide(x.dtype)
        return layer_norm(x, use(self.weight, full), use(self.bias, full), self.eps)


def _norm(cfg: VisionConfig, dim: int, eps: float) -> RmsNorm | LayerNorm:
    return RmsNorm(dim, eps) if cfg.norm == "rms" else LayerNorm(dim, eps)


def _bias(module: nnx.Module, leaf: str, dtype: Any) -> jax.Array | float:
    bias = getattr(module, f"{leaf}_bias", None)
    return 0.0 if bias is None else use(bias, dtype)


class Block(nnx.Module):
    """Attention inside each image, then an MLP, each behind a norm and added."""

    def __init__(self, cfg: VisionConfig, std: float, rngs: nnx.Rngs):
        D, F, N, H = cfg.dim, cfg.mlp_dim, cfg.num_heads, cfg.head_dim
        self.cfg = cfg
        self.norm0, self.norm1 = _norm(cfg, D, cfg.norm_eps), _norm(cfg, D, cfg.norm_eps)
        axes = ("embed", None, "heads", None)
        self.qkv = weight(rngs, (D, 3, N, H), axes, std=std, matrix=(-4, -1), head_axis=-2)
        self.o = weight(rngs, (N * H, D), ("heads", "embed"), std=std)
        self.fc0 = weight(rngs, (D, F), ("embed", "ffn"), std=std)
        self.fc1 = weight(rngs, (F, D), ("ffn", "embed"), std=std)
        if cfg.biases:
            self.qkv_bias = vector(jnp.zeros((3, N, H)), (None, "heads", None))
            self.fc0_bias = vector(jnp.zeros(F), ("ffn",))
            self.o_bias, self.fc1_bias = (vector(jnp.zeros(D), (None,)) for _ in range(2))

    def __call__(
        self, x_BZD: jax.Array, angles_BZh: jax.Array, image_ids_BZ: jax.Array
    ) -> jax.Array:
        """The next residual; padding (id 0) stays finite and reaches no image."""
        dtype = x_BZD.dtype
        qkv = project(self, "qkv", self.norm0(x_BZD)) + _bias(self, "qkv", dtype)
        q, k, v = (qkv[:, :, i] for i in range(3))
        out_BZNH = batch_local(self._attend, (0,) * 5)(q, k, v, angles_BZh, image_ids_BZ)
        flat = out_BZNH.astype(dtype).reshape(*x_BZD.shape[:2], -1)
        x_BZD = x_BZD + project(self, "o", flat) + _bias(self, "o", dtype)
        hidden = project(self, "fc0", self.norm1(x_BZD)) + _bias(self, "fc0", dtype)
        hidden = jax.nn.gelu(hidden.astype(wide(dtype)), approximate=True).astype(dtype)
        return x_BZD + project(self, "fc1", hidden) + _bias(self, "fc1", dtype)

    def _attend(self, q_BZNH, k_BZNH, v_BZNH, angles_BZh, image_ids_BZ):
        q_BZNH, k_BZNH = (turned(x, angles_BZh) for x in (q_BZNH, k_BZNH))
        scale = self.cfg.head_dim**-0.5
        out, _ = mla_attention(
            q_BZNH, k_BZNH, v_BZNH, scale=scale, segment_ids=image_ids_BZ, causal=False
        )
        return out


class Projector(nnx.Module):
    """Four neighbouring patches to one embedding: two maps with an exact GELU between them."""

    def __init__(self, cfg: VisionConfig, text_dim: int, std: float, rngs: nnx.Rngs):
        wide_dim = MERGE * MERGE * cfg.dim
        if cfg.projector_norm == "before":
            self.pre_norm = _norm(cfg, cfg.dim, cfg.projector_eps)
        else:
            self.post_norm = _norm(cfg, text_dim, cfg.projector_eps)
        self.fc0 = weight(rngs, (wide_dim, wide_dim), ("embed", "ffn"), std=std)
        self.fc1 = weight(rngs, (wide_dim, text_dim), ("ffn", "embed"), std=std)
        if cfg.biases:
            self.fc0_bias = vector(jnp.zeros(wide_dim), ("ffn",))
            self.fc1_bias = vector(jnp.zeros(text_dim), (None,))

    def __call__(self, x_Bz4D: jax.Array) -> jax.Array:
        dtype = x_Bz4D.dtype
        if hasattr(self, "pre_norm"):
            x_Bz4D = self.pre_norm(x_Bz4D)
        x_BzD = x_Bz4D.reshape(*x_Bz4D.shape[:2], -1)
        hidden = x_BzD @ use(self.fc0, dtype) + _bias(self, "fc0", dtype)
        hidden = jax.nn.gelu(hidden.astype(wide(dtype)), approximate=False).astype(dtype)
        out = hidden @ use(self.fc1, dtype) + _bias(self, "fc1", dtype)
        return self.post_norm(out) if hasattr(self, "post_norm") else out


class VisionTower(nnx.Module):
    """Buffers of patches to features of the text's width."""

    def __init__(
        self, cfg: VisionConfig, text_dim: int, std: float, rngs: nnx.Rngs, *,
        adapters: tuple[AdapterSpec, ...] = (),
    ):  # fmt: skip
        """
        Args:
          adapters: low-rank adapters of every block.
        """
        self.cfg = cfg
        p, D = cfg.patch, cfg.dim
        axes = (None, None, None, "embed")
        self.patch = weight(rngs, (3, p, p, D), axes, std=std, matrix=None)
        if cfg.biases:
            self.patch_bias = vector(jnp.zeros(D), (None,))
        grid_axes = (None, None, "embed")
        self.grid = weight(rngs, (cfg.grid, cfg.grid, D), grid_axes, std=std, matrix=None)
        self.blocks = _stacked_blocks(cfg, std, rngs, adapters)
        self.final_norm = _norm(cfg, D, cfg.norm_eps)
        self.projector = Projector(cfg, text_dim, std, rngs)

    def __call__(self, patches: Patches, *, dtype: Any, remat: Policy | str = "none") -> jax.Array:
        """Features of every 2 x 2 patches.

        Args:
          patches: the buffers.
          dtype: compute dtype.
          remat: what the backward pass recomputes, see `moejax.memory.policy`.
        Returns:
          [B, Z/4, text width] in `dtype`; of padding finite numbers without meaning.
        """
        x_BZD = self.encode(self.embed(patches, dtype), patches, remat)
        return self.projector(self.merge(x_BZD, patches))

    def embed(self, patches: Patches, dtype: Any) -> jax.Array:
        """Patches as vectors with what says where they are, [B, Z, D]."""
        pixels = normalised(patches.pixels).astype(dtype)
        x_BZD = jnp.einsum("bzcyx,cyxd->bzd", pixels, use(self.patch, dtype))
        x_BZD = x_BZD + _bias(self, "patch", dtype)
        resize, axes = self.cfg.grid_resize, self.grid.get_metadata()["axes"]
        read = batch_local(
            lambda at, grid: grid_positions(at, grid, resize), (0,), weights={1: axes}
        )
        where = read(patches.places, self.grid[...].astype(wide(dtype)))
        if patches.frames is not None:
            where = where + frame_vector(patches.frames, self.cfg.dim)
        return constrain(x_BZD + where.astype(dtype), ("batch", None, "embed"))

    def encode(self, x_BZD: jax.Array, patches: Patches, remat: Policy | str = "none") -> jax.Array:
        """All blocks and the last norm."""
        graph, state = nnx.split(self.blocks)
        angles_BZh = turns(patches.places, self.cfg.head_dim)

        def block(x_BZD, state):
            return nnx.merge(graph, state)(x_BZD, angles_BZh, patches.image_ids)

        step = remat_under(block, remat)
        x_BZD, _ = scan_layers(
            lambda x, state: (step(x, state), None), x_BZD, state, self.cfg.num_layers
        )
        return self.final_norm(x_BZD)

    def merge(self, x_BZD: jax.Array, patches: Patches) -> jax.Array:
        """Groups of patches, averaged over the frames of a clip: [B, Z/4, 4, D]."""
        B, Z, D = x_BZD.shape
        x_Bz4D = x_BZD.reshape(B, Z // MERGE**2, MERGE**2, D)
        if patches.tokens is None:
            return x_Bz4D
        return batch_local(_mean_by_token, (0, 0))(x_Bz4D, patches.tokens)


def normalised(pixels: jax.Array) -> jax.Array:
    """Bytes to -1 .. 1; floats are so already."""
    return pixels if jnp.issubdtype(pixels.dtype, jnp.floating) else pixels / 127.5 - 1.0


def _mean_by_token(x_Bz4D: jax.Array, tokens_Bz: jax.Array) -> jax.Array:
    """The mean of all groups that stand for one token; a token without any is 0."""

    def one(x_z4D, tokens_z):
        num = x_z4D.shape[0]
        place = jnp.where(tokens_z >= 0, tokens_z, num)
        full = x_z4D.astype(wide(x_z4D.dtype))
        total = jax.ops.segment_sum(full, place, num + 1)[:num]
        count = jax.ops.segment_sum(jnp.ones(num, full.dtype), place, num + 1)[:num]
        return (total / jnp.maximum(count, 1)[:, None, None]).astype(x_z4D.dtype)

    return jax.vmap(one)(x_Bz4D, tokens_Bz)


def _stacked_blocks(
    cfg: VisionConfig, std: float, rngs: nnx.Rngs, adapters: tuple[AdapterSpec, ...]
) -> Block:
    """One block module with the parameters of all, each initialised from its own key."""

    def block(key: Any) -> Block:
        own = nnx.Rngs(params=key)
        made = Block(cfg, std, own)
        attach(made, adapters, own)
        return made

    graph, _ = nnx.split(nnx.eval_shape(lambda: block(0)))
    keys = jax.random.split(rngs.params(), cfg.num_layers)
    return nnx.merge(graph, jax.vmap(lambda key: nnx.split(block(key))[1])(keys))
