"""A model with its weights on a mesh, for people who call it from Python."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import ConfigError, ModelConfig
from moejax.generate.engine import Generator, generate, without_limits
from moejax.layers.param import use
from moejax.models.parts import ModelParts
from moejax.partitioning import BATCH_AXES, batch_local, constrain, num_batch_shards

IGNORED = -100


class TokenScores(NamedTuple):
    """What a model says about the label at every position.

    Attributes:
      losses: float32 [B, T], cross entropy in nats; 0 where no label counts.
      greedy: bool [B, T], whether the label is the most likely token; False where none counts.
      counted: bool [B, T], where a label counts.
    """

    losses: np.ndarray
    greedy: np.ndarray
    counted: np.ndarray


class LanguageModel:
    """Weights of one model, and what they say about tokens.

    Every method gives the same numbers on every mesh, whatever else stands in a row or beside it; a
    capacity of the experts, which would break that, is for training only.

    Attributes:
      config: the model.
      parts: the model as data.
      params, balance: its arrays, nested dicts on the mesh.
      mesh: the devices.
      tokenizer: None where the weights came without one.
      compute_dtype: the type layers compute in.
      compiler_options: what `jax.jit` is given, None for its own choice.
    """

    compiler_options: dict[str, Any] | None = None

    def __init__(
        self, parts: ModelParts, params: dict, balance: dict, mesh: Mesh, *, tokenizer: Any = None,
        compute_dtype: Any = jnp.float32,
    ):  # fmt: skip
        self.parts, self.params, self.balance, self.mesh = parts, params, balance, mesh
        self._used = without_limits(parts)
        self.tokenizer, self.compute_dtype = tokenizer, jnp.dtype(compute_dtype)

    @property
    def config(self) -> ModelConfig:
        """The model's section of a config."""
        return self.parts.cfg

    def logits(
        self, token_ids: Any, segment_ids: Any = None, positions: Any = None, *,
        pinned_experts: Any = None,
    ) -> jax.Array:  # fmt: skip
        """Logits of the next token at every position.

        Args:
          token_ids: int [B, T] (or [T], taken as one row).
          segment_ids: int [B, T], non-decreasing along a row, 0 = padding; documents in a row do
            not see each other. None: one document a row.
          positions: int [B, T], counting on by one inside a document; where it falls back to 0 a
            new document begins. Only differences matter to this family. None: as segment_ids say.
          pinned_experts: int [layers, B, T, A], experts to use instead of the routers' choice (rows
            of dense layers are not read).
        Returns:
          float32 [B, T, V].
        Raises:
          ConfigError: shapes that differ, a token outside the vocabulary, positions that do not
            count on.
        """
        tokens, segments = self._rows(token_ids, segment_ids, positions)
        pinned = None if pinned_experts is None else self._pinned(pinned_experts, tokens.shape)
        with jax.set_mesh(self.mesh):
            out = self._logits_fn(self.params, self.balance, self._hidden(tokens, segments, pinned))
        return out[: len(tokens)]

    def loss(
        self, token_ids: Any, labels: Any = None, segment_ids: Any = None, *, aligned: bool = False
    ) -> float:
        """Mean cross entropy in nats over the labels that are not -100.

        Args:
          token_ids: int [B, T].
          labels: int [B, T]; None: the tokens themselves (with aligned=False).
          segment_ids: as in :meth:`logits`.
          aligned: False: labels stand where the tokens stand and are shifted here (the label at
            t + 1 scores position t, within one document), as Hugging Face models do. True: the
            label at t scores position t.
        Returns:
          The mean; nan when no label counts.
        """
        losses, counted = self.token_losses(token_ids, labels, segment_ids, aligned=aligned)
        count = int(counted.sum())
        return float(losses.sum(dtype=np.float64) / count) if count else float("nan")

    def token_losses(
        self, token_ids: Any, labels: Any = None, segment_ids: Any = None, *, aligned: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cross entropy at every position, float32 [B, T], 0 where none counts; and which do."""
        scores = self.token_scores(token_ids, labels, segment_ids, aligned=aligned)
        return scores.losses, scores.counted

    def token_scores(
        self, token_ids: Any, labels: Any = None, segment_ids: Any = None, *, aligned: bool = False
    ) -> TokenScores:
        """Losses, and whether the label is the most likely token; arguments as in :meth:`loss`."""
        tokens, segments = self._rows(token_ids, segment_ids, None)
        given = tokens if labels is None else _as_rows(labels, "labels")
        if given.shape != tokens.shape:
            raise ConfigError(f"labels have shape {given.shape}, token_ids {tokens.shape}.")
        if labels is None and aligned:
            raise ConfigError("aligned=True needs labels: a token does not predict itself.")
        wanted = given if aligned else shifted(given, segments)
        wanted = np.where(segments > 0, wanted, IGNORED)
        self._check_ids(wanted[wanted != IGNORED], "labels")
        hidden = self._hidden(tokens, segments)
        with jax.set_mesh(self.mesh):
            scores = self._score_fn(self.params, self.balance, hidden, self._place(wanted))
        losses, greedy = (np.asarray(x)[: len(tokens)] for x in scores)
        return TokenScores(losses, greedy, wanted != IGNORED)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, **options: Any
    ) -> list[list[int]]:
        """Continues prompts of token ids; the options are those of `moejax.generate.generate`."""
        return generate(self, prompts, max_new_tokens=max_new_tokens, **options)

    @functools.cached_property
    def generator(self) -> Generator:
        """The programs that generate, kept from call to call."""
        return Generator(self.parts, mesh=self.mesh, dtype=self.compute_dtype)

    def _rows(self, token_ids: Any, segment_ids: Any, positions: Any):
        tokens = _as_rows(token_ids, "token_ids")
        self._check_ids(tokens, "token_ids")
        if positions is not None:
            segment_ids = _segments(_as_rows(positions, "positions"), segment_ids)
        segments = (
            np.ones_like(tokens) if segment_ids is None else _as_rows(segment_ids, "segment_ids")
        )
        if segments.shape != tokens.shape:
            raise ConfigError(
                f"segment_ids have shape {segments.shape}, token_ids {tokens.shape}: give one each."
            )
        if np.any(np.diff(segments, axis=1) < 0) or np.any(segments < 0):
            raise ConfigError("segment_ids must not fall along a row; 0 in front is padding.")
        vision = self.config.vision
        pads = (tokens == vision.pad_token) & (segments > 0)
        if vision.num_layers and pads.any():
            raise ConfigError(
                f"token_ids hold the pad token of images, {vision.pad_token}, in row "
                f"{int(np.argmax(pads.any(1)))}, and images are seen by `generate` only. Take it "
                "out."
            )
        return tokens, segments

    def _check_ids(self, ids: np.ndarray, name: str) -> None:
        if ids.size and (ids.min() < 0 or ids.max() >= self.config.vocab_size):
            worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise ConfigError(
                f"{name} hold {worst}; tokens of this model are 0 to {self.config.vocab_size - 1}."
            )

    def _place(self, row: np.ndarray) -> jax.Array:
        """Rows [B, T] on the mesh, filled up with empty ones to a number that it divides."""
        ways = num_batch_shards(dict(self.mesh.shape))
        full = np.concatenate([row, np.zeros((-len(row) % ways, row.shape[1]), row.dtype)])
        where = NamedSharding(self.mesh, P(BATCH_AXES))
        return jax.make_array_from_callback(full.shape, where, lambda index: full[index])

    def _pinned(self, experts: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Experts checked: every layer's, for every token, each a number that there is."""
        moe, array = self.config.moe, np.asarray(experts)
        wanted = (self.config.num_layers, *shape, moe.top_k)
        if array.shape != wanted or array.min() < 0 or array.max() >= moe.num_experts:
            raise ConfigError(
                f"pinned_experts have shape {array.shape}; they must be {wanted}, each 0 to "
                f"{moe.num_experts - 1}."
            )
        return array.astype(np.int32)

    def _hidden(
        self, tokens: np.ndarray, segments: np.ndarray, pinned: np.ndarray | None = None
    ) -> jax.Array:
        """Hidden states after the final norm; the head has programs of its own."""
        with jax.set_mesh(self.mesh):
            placed = self._place(tokens), self._place(segments)
            if pinned is None:
                return self._hidden_fn(self.params, self.balance, *placed)
            ways = num_batch_shards(dict(self.mesh.shape))
            rows = [(0, 0), (0, -pinned.shape[1] % ways), (0, 0), (0, 0)]
            where = NamedSharding(self.mesh, P(None, BATCH_AXES))
            held = jax.device_put(np.pad(pinned, rows), where)
            return self._hidden_fn(self.params, self.balance, *placed, held)

    @functools.cached_property
    def _hidden_fn(self):
        def hidden(params, balance, tokens_BT, segments_BT, pinned_XBTA=None):
            model = self._used.bind(params, balance)
            dtype = self.compute_dtype
            return model(tokens_BT, segments_BT, dtype=dtype, pinned_XBTA=pinned_XBTA)[0]

        return self._jit(hidden)

    @functools.cached_property
    def _logits_fn(self):
        def logits(params, balance, hidden_BTD):
            return self._used.bind(params, balance).logits(hidden_BTD)

        return self._jit(logits)

    @functools.cached_property
    def _score_fn(self):
        def scores(params, balance, hidden_BTD, labels_BT):
            table = self._used.bind(params, balance).head_table()
            out = score_tokens(hidden_BTD, use(table, self.compute_dtype), labels_BT)
            return tuple(constrain(x_BT, (None, None)) for x_BT in out)  # whole on every process

        return self._jit(scores)

    def _jit(self, fn):
        """float32 means float32: TF32 or bfloat16 passes are not what was asked for."""
        exact = self.compute_dtype == jnp.float32

        def run(*args):
            with jax.default_matmul_precision("highest" if exact else "default"):
                return fn(*args)

        return jax.jit(run, compiler_options=self.compiler_options)


def score_tokens(
    hidden_BTD: jax.Array, table_VD: jax.Array, labels_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of every label: cross entropy, float32 [B, T], and whether it is the most likely token.

    0 and False where the label is -100. Logits stand in memory a row at a time.
    """

    def local(hidden_BTD, labels_BT, table_VD):
        def row(_, inputs):
            hidden_TD, labels_T = inputs
            full = jnp.promote_types(hidden_TD.dtype, jnp.float32)
            logits_TV = jnp.einsum("td,vd->tv", hidden_TD, table_VD, preferred_element_type=full)
            picked_T = jnp.take_along_axis(logits_TV, jnp.maximum(labels_T, 0)[:, None], 1)[:, 0]
            losses_T = jax.nn.logsumexp(logits_TV, 1) - picked_T
            greedy_T = jnp.argmax(logits_TV, 1) == labels_T
            return None, (jnp.where(labels_T == IGNORED, 0, losses_T), greedy_T)

        return jax.lax.scan(row, None, (hidden_BTD, labels_BT))[1]

    return batch_local(local, (0, 0))(hidden_BTD, labels_BT, table_VD)


def shifted(labels_BT: np.ndarray, segments_BT: np.ndarray) -> np.ndarray:
    """Labels moved one to the left inside their document; -100 at every document's end."""
    out = np.full_like(labels_BT, IGNORED)
    same = segments_BT[:, 1:] == segments_BT[:, :-1]
    out[:, :-1] = np.where(same, labels_BT[:, 1:], IGNORED)
    return out


def _as_rows(values: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ConfigError(f"{name} must be rows of one length [B, T].") from error
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer) or not array.size:
        raise ConfigError(
            f"{name} must be whole numbers [B, T] with at least one token; given are "
            f"{array.dtype} of shape {array.shape}."
        )
    if array.min() < -(2**31) or array.max() >= 2**31:
        raise ConfigError(f"{name} hold {int(max(array.max(), -array.min()))}: beyond 32 bits.")
    return array.astype(np.int32)


def _segments(positions_BT: np.ndarray, segment_ids: Any) -> np.ndarray:
    """Documents as the positions count them, checked against segment ids where both are given."""
    steps = np.diff(positions_BT, axis=1)
    starts = positions_BT[:, 1:] == 0
    if segment_ids is None:
        broken = (steps != 1) & ~starts
        segments = 1 + np.concatenate([np.zeros_like(positions_BT[:, :1]), np.cumsum(starts, 1)], 1)
    else:
        segments = _as_rows(segment_ids, "segment_ids")
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        broken = same & (steps != 1)
    if np.any(broken):
        row, at = (int(i[0]) for i in np.nonzero(broken))
        raise ConfigError(
            f"positions must count on by one inside a document; row {row} goes from "
            f"{positions_BT[row, at]} to {positions_BT[row, at + 1]} at token {at + 1}."
        )
    return segments
