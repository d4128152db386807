"""The KDA layer: projections, short convolution, delta rule, gated norm.

Architecture section 2.2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import KdaConfig
from moejax.layers.adapter import Drop, project
from moejax.layers.cache import KdaCache, Now
from moejax.layers.param import use, vector, weight, wide
from moejax.memory import names
from moejax.memory.names import tag
from moejax.partitioning import batch_local
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.kda import kda_fused
from pallas_kernels.short_conv import short_conv


def init_dt_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``log(e^dt - 1)`` with dt log-uniform in [1e-3, 0.1] and at least 1e-4.

    So softplus gives dt back.
    """
    low, high = jnp.log(1e-3), jnp.log(0.1)
    dt = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high)), 1e-4)
    return jnp.log(jnp.expm1(dt))


class Kda(nnx.Module):
    """Kimi Delta Attention over a packed row. Reads [B, T, D], gives [B, T, D]."""

    def __init__(self, dim: int, cfg: KdaConfig, eps: float, std: float, rngs: nnx.Rngs):
        N, H, h = cfg.num_heads, cfg.head_dim, cfg.value_head_dim
        self.cfg, self.eps = cfg, eps
        head: dict[str, Any] = {"std": std, "matrix": (-3, -1), "head_axis": -2}
        self.q = weight(rngs, (dim, N, H), ("embed", "heads", None), **head)
        self.k = weight(rngs, (dim, N, H), ("embed", "heads", None), **head)
        self.v = weight(rngs, (dim, N, h), ("embed", "heads", None), **head)
        bound = cfg.conv_size**-0.5  # the usual uniform start of a depthwise convolution

        def taps(width: int) -> nnx.Param:
            shape = (cfg.conv_size, N, width)
            return vector(
                jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound),
                (None, "heads", None),
            )

        self.q_conv, self.k_conv, self.v_conv = taps(H), taps(H), taps(h)
        if cfg.decay_rank:
            self.decay_a = weight(rngs, (dim, cfg.decay_rank), ("embed", None), std=std)
            self.decay_b = weight(rngs, (cfg.decay_rank, N * H), ("latent", "heads"), std=std)
        else:
            self.decay = weight(rngs, (dim, N * H), ("embed", "heads"), std=std)
        self.beta = weight(rngs, (dim, N), ("embed", "heads"), std=std, matrix=None)
        softplus = cfg.gate == "softplus"
        uniform = jax.random.uniform(rngs.params(), (N,), minval=1.0, maxval=16.0)
        self.a_log = vector(jnp.log(uniform) if softplus else jnp.zeros(N), ("heads",))
        self.dt_bias = vector(init_dt_bias(rngs.params(), (N, H)), ("heads", None))
        if cfg.output_gate == "full":
            self.gate = weight(rngs, (dim, N * h), ("embed", "heads"), std=std)
        else:
            self.gate_a = weight(rngs, (dim, cfg.output_gate_rank), ("embed", None), std=std)
            self.gate_b = weight(rngs, (cfg.output_gate_rank, N * h), ("latent", "heads"), std=std)
        self.o_norm = vector(jnp.ones(h), (None,))
        self.o = weight(rngs, (N * h, dim), ("heads", "embed"), std=std)

    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array, drop: Drop | None = None
    ) -> tuple[jax.Array, dict]:
        acts, weights = self._inputs(x_BTD, drop)
        y_BTNh = batch_local(self._attend, (0,) * 7)(*acts, segment_ids_BT, *weights)
        return self._project_out(y_BTNh, drop), {}

    def cached(self, x_BTD: jax.Array, cache: Any, now: Now) -> tuple[jax.Array, KdaCache]:
        """Output for the tokens at hand, and what the layer remembers after them.

        A fresh row goes through in chunks; after that tokens come one by one, a step of the
        recurrence each, at a cost that no position changes.
        """
        acts, weights = self._inputs(x_BTD)
        if now.fresh:
            run = batch_local(self._attend_and_remember, (0,) * 7)
            y_BTNh, *memory = run(*acts, now.segment_ids(x_BTD.shape[1]), *weights)
        else:
            run = batch_local(self._step, (0,) * 10)
            y_BTNh, *memory = run(*acts, *cache, *weights)
        return self._project_out(y_BTNh), KdaCache(*memory)

    def _inputs(
        self, x_BTD: jax.Array, drop: Drop | None = None
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """What goes into the mixing row by row: projections of x, and the small weights."""
        cfg, full = self.cfg, wide(x_BTD.dtype)
        B, T, _ = x_BTD.shape
        qkv = [tag(project(self, name, x_BTD, drop=drop), names.KDA_QKV) for name in "qkv"]
        taps = [use(w, full) for w in (self.q_conv, self.k_conv, self.v_conv)]
        decay_BTX = tag(self._low_rank(x_BTD, "decay", drop), names.KDA_DECAY)
        decay_BTNH = decay_BTX.reshape(B, T, cfg.num_heads, cfg.head_dim)
        beta_BTN = project(self, "beta", x_BTD, drop=drop)
        gate_BTX = tag(self._low_rank(x_BTD, "gate", drop), names.KDA_GATE)
        gate_BTNh = gate_BTX.reshape(B, T, cfg.num_heads, cfg.value_head_dim)
        small = (use(w, full) for w in (self.a_log, self.dt_bias, self.o_norm))
        return (*qkv, decay_BTNH, beta_BTN, gate_BTNh), (*taps, *small)

    def _project_out(self, y_BTNh: jax.Array, drop: Drop | None = None) -> jax.Array:
        flat_BTX = y_BTNh.reshape(*y_BTNh.shape[:2], -1)
        return tag(project(self, "o", flat_BTX, drop=drop), names.ATTENTION_OUT)

    def _low_rank(self, x_BTD: jax.Array, name: str, drop: Drop | None) -> jax.Array:
        """x through one map, or through its two low-rank factors where the config has them."""
        if hasattr(self, name):
            return project(self, name, x_BTD, drop=drop)
        return project(self, name + "_b", project(self, name + "_a", x_BTD, drop=drop), drop=drop)

    def _attend(self, q, k, v, decay, beta, gate, segment_ids, *weights):
        """What stands between the projections, row by row: convolution, delta rule, gated norm."""
        args = (q, k, v, decay, beta, gate, segment_ids, *weights)
        return self._attend_and_remember(*args)[0]

    def _attend_and_remember(self, q, k, v, decay, beta, gate, segment_ids, *weights):
        """`_attend`, the state and the three convolutions' histories after the last position."""
        return self._mix((q, k, v), decay, beta, gate, weights, segment_ids=segment_ids)

    def _step(self, q, k, v, decay, beta, gate, state, q_past, k_past, v_past, *weights):
        """`_attend_and_remember` for one token that follows what is remembered."""
        past = KdaCache(state, q_past, k_past, v_past)
        return self._mix((q, k, v), decay, beta, gate, weights, past=past)

    def _mix(self, qkv, decay, beta, gate, weights, *, segment_ids=None, past=None):
        *taps, a_log, dt_bias, o_norm = weights
        histories = past[1:] if past else (None,) * 3
        (q, k, v), memory = zip(
            *(
                _conv(x, w, segment_ids, history)
                for x, w, history in zip(qkv, taps, histories, strict=True)
            ),
            strict=True,
        )
        bound = self.cfg.gate_lower_bound if self.cfg.gate == "bounded" else None
        out_BTNh, state = kda_fused(
            q,
            k,
            v,
            decay,
            beta,
            a_log,
            dt_bias,
            lower_bound=bound,
            segment_ids=segment_ids,
            initial_state=past.state if past else None,
            chunk=self.cfg.chunk,
            impl="ref" if past else None,  # one step of the recurrence; chunks have nothing to gain
        )
        y_BTNh = gated_norm(out_BTNh, gate, o_norm, eps=self.eps)
        return y_BTNh, state, *memory


def _conv(x_BTNH: jax.Array, taps_KNH: jax.Array, segment_ids_BT, history_BKX):
    """The convolution of all heads' channels, and its history after the last position."""
    B, T, N, H = x_BTNH.shape
    y, history = short_conv(
        x_BTNH.reshape(B, T, N * H),
        taps_KNH.reshape(-1, N * H),
        segment_ids=segment_ids_BT,
        initial_state=history_BKX,
    )
    return y.reshape(B, T, N, H), history
