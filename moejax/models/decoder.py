"""The decoder: embedding, scanned layers, final mix and norm, head (architecture section 1.2)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.config import ModelConfig
from moejax.layers.adapter import AdapterSpec, within_ranks
from moejax.layers.attn_res import AttnRes
from moejax.layers.cache import LayerCache, Now, read_layer, write_layer
from moejax.layers.embed import Embed
from moejax.layers.moe.placement import Spread
from moejax.layers.norm import RmsNorm
from moejax.layers.param import use
from moejax.layers.quantised import as_bytes, dequantised
from moejax.layers.vision.images import Images, RowImages, with_features
from moejax.layers.vision.tower import VisionTower
from moejax.memory.host_state import brought
from moejax.memory.layer_loop import Loop, run_layers, scan_layers
from moejax.memory.policy import Policy
from moejax.models.block import DecoderLayer, Residual, num_sources, start_residual
from moejax.models.cache import DecodeCache, spread
from moejax.models.grouping import LayerKind, Segment, segments_of
from moejax.partitioning import constrain

# Adapters of every stack's runs; empty without any.
AdapterPlan = tuple[tuple[tuple[AdapterSpec, ...], ...], ...]


def layer_kinds(cfg: ModelConfig) -> tuple[LayerKind, ...]:
    """Kind of every layer of a model."""
    return tuple(map(LayerKind, cfg.attention_kinds(), cfg.ffn_kinds()))


class Stack(nnx.Module):
    """The layers of one segment.

    Per run one module, whose parameters carry [repeats, count] in front.
    """

    def __init__(
        self, cfg: ModelConfig, segment: Segment, rngs: nnx.Rngs, *,
        adapters: tuple[tuple[AdapterSpec, ...], ...] = (), **options,
    ):  # fmt: skip
        """
        Args:
          adapters: those of every run's layers; empty where there are none at all.
        """
        self.segment = segment
        for i, run in enumerate(segment.runs):
            specs = adapters[i] if adapters else ()
            layer = _stacked_layer(
                cfg, run.kind, (segment.repeats, run.count), rngs, {**options, "adapters": specs}
            )
            within_ranks(layer, specs)
            setattr(self, f"run{i}", layer)

    def __call__(
        self,
        residual: Residual,
        segment_ids_BT,
        dropout_key,
        policy: Policy | str,
        pinned_XBTA=None,
    ) -> tuple[Residual, list[dict]]:
        """All layers of the segment.

        Returns:
          The state after them, and per run the auxiliary values, stacked [repeats, count, ...].
        """
        graphs, states = self._split()
        consts = (segment_ids_BT, dropout_key, pinned_XBTA)

        def layer(graph, residual, x, consts):
            state, index = x
            segment_ids_BT, dropout_key, pinned_XBTA = consts
            module = _layer(graph, state, residual)
            return module(residual, segment_ids_BT, index, dropout_key, pinned_XBTA)

        return run_layers(
            [functools.partial(layer, graph) for graph in graphs], residual,
            list(zip(states, self._numbers(), strict=True)), consts, self._loop(),
            policy=policy, keep=Residual.kept, rebuild=Residual.rebuilt,
        )  # fmt: skip

    def _loop(self) -> Loop:
        return Loop(self.segment.repeats, tuple(run.count for run in self.segment.runs))

    def _numbers(self) -> list[jax.Array]:
        """Number of every layer in the whole model, per run int32 [repeats, count]."""
        starts = self.segment.first + self.segment.period * np.arange(self.segment.repeats)
        numbers = []
        for run in self.segment.runs:
            numbers.append(jnp.asarray(starts[:, None] + np.arange(run.count), jnp.int32))
            starts = starts + run.count
        return numbers

    def cached(
        self, residual: Residual, caches: tuple[LayerCache, ...], now: Now
    ) -> tuple[Residual, tuple[LayerCache, ...]]:
        """All layers of the segment on the tokens at hand.

        The caches [repeats, count, ...] travel in the loops' carry, where each layer's news are
        written in place.
        """
        graphs, states = self._split()

        def group(carry, repeat_states):
            residual, caches = carry
            repeat, run_states = repeat_states
            first = self.segment.first + repeat * self.segment.period
            updated = []
            for graph, state, run, cache in zip(
                graphs, run_states, self.segment.runs, caches, strict=True
            ):

                def layer(carry, xs, graph=graph, first=first, repeat=repeat):
                    (residual, cache), (state, count) = carry, xs
                    before = read_layer(cache, repeat, count)
                    module = _layer(graph, brought(state), residual)
                    residual, news = module.cached(residual, before, now, first + count)
                    return (residual, write_layer(cache, news, repeat, count, now.position)), None

                counts = jnp.arange(run.count, dtype=jnp.int32)
                (residual, cache), _ = scan_layers(
                    layer, (residual, cache), (state, counts), run.count
                )
                updated.append(cache)
                first += run.count
            return (residual, tuple(updated)), None

        repeats = jnp.arange(self.segment.repeats, dtype=jnp.int32)
        carry, _ = scan_layers(group, (residual, caches), (repeats, states), self.segment.repeats)
        return carry

    def _split(self) -> tuple[list, list]:
        """Graphs and stacked parameters of the runs."""
        split = [nnx.split(getattr(self, f"run{i}")) for i in range(len(self.segment.runs))]
        return [graph for graph, _ in split], [as_bytes(state) for _, state in split]


def _layer(graph: Any, state: Any, residual: Residual) -> DecoderLayer:
    """One layer of a stack, its maps plain in the compute dtype whatever they are stored as."""
    return dequantised(nnx.merge(graph, state), residual.sources_XBTD.dtype)


def _stacked_layer(
    cfg: ModelConfig, kind: LayerKind, lead: tuple[int, int], rngs: nnx.Rngs, options
) -> DecoderLayer:
    """A layer module with the parameters of `lead` layers, each initialised from its own key."""

    def init(key: jax.Array):
        return nnx.split(DecoderLayer(cfg, kind, nnx.Rngs(params=key), **options))

    graph, _ = nnx.split(
        nnx.eval_shape(lambda: DecoderLayer(cfg, kind, nnx.Rngs(params=0), **options))
    )
    keys = jax.random.split(rngs.params(), lead)
    state = jax.vmap(jax.vmap(lambda key: init(key)[1]))(keys)
    return nnx.merge(graph, state)


class Decoder(nnx.Module):
    """Tokens to hidden states; the loss and sampling apply the head themselves."""

    def __init__(
        self, cfg: ModelConfig, rngs: nnx.Rngs, *,
        track_max_logit: bool = False, watch: bool = False, spread: Spread | None = None,
        adapters: AdapterPlan = (), adapter_dropout: float = 0.0, base_format: str = "plain",
        vision_adapters: tuple[AdapterSpec, ...] = (),
    ):  # fmt: skip
        self.cfg = cfg
        self.embed = Embed(cfg.vocab_size, cfg.dim, cfg.init_std, rngs)
        segments = segments_of(layer_kinds(cfg))
        options: dict[str, Any] = {
            "track_max_logit": track_max_logit, "watch": watch, "spread": spread,
            "adapter_dropout": adapter_dropout, "base_format": base_format,
        }  # fmt: skip
        self.num_stacks = len(segments)
        for i, segment in enumerate(segments):
            runs = adapters[i] if adapters else ()
            setattr(self, f"stack{i}", Stack(cfg, segment, rngs, adapters=runs, **options))
        if cfg.attn_res_block:
            self.final_mix = AttnRes(cfg.dim, cfg.norm_eps)
        self.final_norm = RmsNorm(cfg.dim, cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.head = Embed(cfg.vocab_size, cfg.dim, cfg.init_std, rngs)
        if cfg.vision.num_layers:
            self.vision = VisionTower(
                cfg.vision, cfg.dim, cfg.init_std, rngs, adapters=vision_adapters
            )

    def __call__(
        self, tokens_BT: jax.Array, segment_ids_BT: jax.Array | None = None, *,
        dtype: Any = jnp.float32, remat: Policy | str = "none",
        dropout_key: jax.Array | None = None, pinned_XBTA: jax.Array | None = None,
        images: Images | RowImages | None = None,
    ) -> tuple[jax.Array, Aux]:  # fmt: skip
        """Hidden states after the final norm.

        Args:
          tokens_BT: int32 ids.
          segment_ids_BT: int32 document numbers, non-decreasing along a row, 0 = padding; None =
            one document a row.
          dtype: compute dtype.
          remat: what the backward pass recomputes, see `moejax.memory.policy`.
          dropout_key: key of this step and microbatch; None turns dropout off.
          pinned_XBTA: int32, experts of every layer and token, instead of the routers' choice (a
            near-tie may fall either way, and then nothing else can be compared).
          images: their features take the places of the tokens that stand for them.
        Returns:
          [B, T, D] in `dtype`, and per segment and run the auxiliary values [repeats, count, ...].
        """
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones_like(tokens_BT)
        residual = self._start(tokens_BT, dtype, images, remat)
        aux = []
        for i in range(self.num_stacks):
            residual, stack_aux = getattr(self, f"stack{i}")(
                residual, segment_ids_BT, dropout_key, remat, pinned_XBTA
            )
            aux.append(stack_aux)
        return self.final_norm(self._last_read(residual)), aux

    def prefill(
        self, tokens_BT: jax.Array, lengths_B: jax.Array, cache: DecodeCache, *,
        dtype: Any = jnp.float32, images: RowImages | None = None,
    ) -> tuple[jax.Array, DecodeCache]:  # fmt: skip
        """Reads prompts in one parallel pass.

        Args:
          tokens_BT: int32 ids, each prompt at the end of its row.
          lengths_B: int32, tokens of each prompt; what stands before them is padding.
          cache: an empty one, with room for at least T positions.
          dtype: compute dtype, that of the cache.
          images: those in the prompts.
        Returns:
          Logits [B, V] of the token that follows each prompt, and the filled cache.
        """
        padding_B = tokens_BT.shape[1] - lengths_B.astype(jnp.int32)
        return self._extend(tokens_BT, cache._replace(padding_B=padding_B), True, dtype, images)

    def decode_step(
        self, tokens_B: jax.Array, cache: DecodeCache, *, dtype: Any = jnp.float32
    ) -> tuple[jax.Array, DecodeCache]:
        """One more token a row: logits [B, V] of the token after it, and the cache with it in."""
        return self._extend(tokens_B[:, None], cache, False, dtype)

    def _extend(self, tokens_BT, cache: DecodeCache, fresh: bool, dtype, images=None):
        residual, now, layers = self._start(tokens_BT, dtype, images), cache.now(fresh=fresh), []
        for i, stack_cache in enumerate(cache.layers):
            residual, stack_cache = getattr(self, f"stack{i}").cached(residual, stack_cache, now)
            layers.append(stack_cache)
        hidden_BTD = self.final_norm(self._last_read(residual)[:, -1:])
        length = cache.length + tokens_BT.shape[1]
        cache = spread(DecodeCache(tuple(layers), cache.padding_B, length))
        return self.logits(hidden_BTD)[:, 0], cache

    def _start(
        self,
        tokens_BT: jax.Array,
        dtype: Any,
        images: Images | RowImages | None = None,
        remat: Policy | str = "none",
    ) -> Residual:
        x_BTD = self.embed(tokens_BT, dtype)
        if images is not None:
            features = self.vision(images.patches, dtype=dtype, remat=remat)
            x_BTD = with_features(x_BTD, features, images)
        x_BTD = constrain(x_BTD, ("batch", "seq", "embed"))
        return start_residual(x_BTD, num_sources(self.cfg.num_layers, self.cfg.attn_res_block))

    def _last_read(self, residual: Residual) -> jax.Array:
        if self.cfg.attn_res_block:
            return self.final_mix(residual.sources_XBTD, residual.last + 1)
        return residual.running_sum()

    def head_table(self) -> nnx.Param:
        """The [V, D] output table."""
        return self.embed.table if self.cfg.tie_embeddings else self.head.table

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Float32 logits [B, T, V] of hidden states: for tests and sampling, never for training."""
        table_VD = use(self.head_table(), hidden_BTD.dtype)
        full = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
        return jnp.einsum("btd,vd->btv", hidden_BTD, table_VD, preferred_element_type=full)


Aux = list[list[dict]]  # per segment and run: values [repeats, count, ...]


def layers_with(aux: Aux, segments: tuple[Segment, ...], name: str) -> list[int]:
    """Numbers of the layers that have an auxiliary value, in the order that the runs hold them."""
    found = []
    for segment, runs in zip(segments, aux, strict=True):
        offset = segment.first
        for run, values in zip(segment.runs, runs, strict=True):
            if name in values:
                starts = [offset + repeat * segment.period for repeat in range(segment.repeats)]
                found += [start + i for start in starts for i in range(run.count)]
            offset += run.count
    return found


def by_layer(aux: Aux, segments: tuple[Segment, ...], name: str) -> jax.Array | None:
    """One auxiliary value of all layers that have it, stacked in layer order.

    None where no layer has it.
    """
    layers = layers_with(aux, segments, name)
    if not layers:
        return None
    values = [run[name] for runs in aux for run in runs if name in run]
    flat = jnp.concatenate([v.reshape(-1, *v.shape[2:]) for v in values])
    return flat[np.argsort(layers)]
