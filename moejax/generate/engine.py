"""Generation: prompts in one parallel pass, then a token a row and step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moejax.config import ConfigError
from moejax.data.image_rows import row_buffers
from moejax.data.patches import PatchedImage, check_pads
from moejax.generate.sample import Sampling, choose, make_draw
from moejax.layers.vision.images import RowImages, images_of
from moejax.models.cache import empty_cache
from moejax.models.parts import ModelParts, model_parts
from moejax.partitioning import num_batch_shards

OnToken = Callable[[int, int], Any]
PromptImages = Sequence[Sequence[PatchedImage]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes that programs are compiled for.

    Every size is rounded up to a power of two, so that few programs serve all prompts.

    Attributes:
      prompt: the shortest prompt a program is compiled for.
      capacity: the least room for prompt and continuation.
      batch: most rows that run at once; more prompts take turns.
      patches: the shortest buffer for images of a prompt.
    """

    prompt: int = 16
    capacity: int = 64
    batch: int = 8
    patches: int = 64


def power_of_two(size: int, floor: int = 1) -> int:
    """The least power of two that is at least `size` and `floor`."""
    return 1 << (max(size, floor, 1) - 1).bit_length()


def without_limits(parts: ModelParts) -> ModelParts:
    """The model as it is used, not trained: no capacity drops a token, nothing is tracked.

    With a capacity a document's numbers would depend on the padding and the documents in its row.
    The exchange between experts is the one that fits the mesh.
    """
    moe = parts.cfg.moe
    free = moe.replace(capacity_factor=0.0, exchange="auto")
    kept = {
        name: parts.options[name]
        for name in ("spread", "adapters", "base_format", "vision_adapters")
    }
    tracked = {name: value for name, value in parts.options.items() if name not in kept}
    if free == moe and not any(tracked.values()):
        return parts
    return model_parts(parts.cfg.replace(moe=free), **kept)


class Generator:
    """The programs that generate with one model on one mesh, each compiled once a shape bucket.

    Weights are arguments of `generate`, so a run in training keeps its programs as it learns.

    Attributes:
      compilations: how often "prefill" and "step" were compiled.
      compiler_options: what `jax.jit` is given, None for its own choice.
    """

    compiler_options: dict[str, Any] | None = None

    def __init__(
        self,
        parts: ModelParts,
        *,
        mesh: Mesh | None = None,
        dtype: Any = jnp.float32,
        buckets: Buckets | None = None,
    ):
        """
        Args:
          parts: the model. A capacity of its experts is lifted, so that no token is dropped, and
            the exchange between experts is the one that fits `mesh`.
          mesh: where weights and rows live; None for one device.
          dtype: compute dtype, and that of the cached rows.
        """
        # On one device there is nothing to share out.
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None
        self.parts, self.dtype = without_limits(parts), jnp.dtype(dtype)
        self.buckets = buckets or Buckets()
        self.compilations: collections.Counter[str] = collections.Counter()
        self._ways = num_batch_shards(dict(self.mesh.shape)) if self.mesh else 1

    def generate(
        self,
        params: dict,
        balance: dict,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop: Collection[int] = (),
        on_token: OnToken | None = None,
        images: PromptImages | None = None,
    ) -> list[list[int]]:
        """Continues every prompt; see :func:`generate`."""
        sampling = sampling or Sampling()
        self._check(prompts, max_new_tokens)
        self._check_images(prompts, images)
        out: list[list[int]] = [[] for _ in prompts]
        # Prompts of like length run together, so that little is spent on padding.
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        for start in range(0, len(order) if max_new_tokens else 0, self.buckets.batch):
            rows = order[start : start + self.buckets.batch]
            batch = {row: prompts[row] for row in rows}
            seen = None if images is None else {row: images[row] for row in rows}
            self._run(params, balance, batch, max_new_tokens, sampling, stop, on_token, out, seen)
        return out

    def _run(
        self, params, balance, prompts, limit, sampling, stop, on_token, out, images=None
    ) -> None:
        """One batch, its rows by number; their tokens are appended to `out`."""
        tokens_BT, lengths_B, rows_B = self._batch(prompts)
        laid = None if images is None else self._laid(tokens_BT, list(images.values()))
        capacity = power_of_two(tokens_BT.shape[1] + limit, self.buckets.capacity)
        prefill, step = self.programs(sampling.greedy, sampling.top_k)
        draw = make_draw(sampling, rows_B)
        active = set(prompts)
        with self.context():
            token_B, cache = prefill(params, balance, tokens_BT, lengths_B, draw, capacity, laid)
            for place in range(1, limit + 1):
                given_B = token_B
                if place < limit:  # under way while the host looks at the token before it
                    token_B, cache = step(params, balance, token_B, cache, draw, np.int32(place))
                for row, token in zip(prompts, np.asarray(given_B).tolist(), strict=False):
                    if row in active and not _take(row, token, stop, on_token, out):
                        active.discard(row)
                if not active:
                    break

    def context(self) -> contextlib.ExitStack:
        """The mesh, and products that are as exact as the dtype says: no TF32 in float32."""
        stack = contextlib.ExitStack()
        if self.mesh is not None:
            stack.enter_context(jax.set_mesh(self.mesh))
        if self.dtype == jnp.float32:
            stack.enter_context(jax.default_matmul_precision("highest"))
        return stack

    @functools.cache  # noqa: B019 - programs live as long as the generator
    def programs(self, greedy: bool, top_k: int) -> tuple[Callable, Callable]:
        """Jitted `(params, balance, tokens_BT, lengths_B, draw, capacity, images) -> (token_B,
        cache)` (images may be left out) and
        `(params, balance, token_B, cache, draw, place) -> (token_B, cache)`, which takes over the
        cache it is given.
        """
        parts, dtype = self.parts, self.dtype

        def prefill(params, balance, tokens_BT, lengths_B, draw, capacity, images=None):
            self.compilations["prefill"] += 1
            empty = empty_cache(parts.cfg, parts.segments, len(tokens_BT), capacity, dtype)
            model = parts.bind(params, balance)
            logits_BV, cache = model.prefill(
                tokens_BT, lengths_B, empty, dtype=dtype, images=images
            )
            return choose(logits_BV, draw, jnp.int32(0), greedy=greedy, top_k=top_k), cache

        def step(params, balance, token_B, cache, draw, place):
            self.compilations["step"] += 1
            model = parts.bind(params, balance)
            logits_BV, cache = model.decode_step(token_B, cache, dtype=dtype)
            return choose(logits_BV, draw, place, greedy=greedy, top_k=top_k), cache

        options: dict[str, Any] = {"compiler_options": self.compiler_options}
        return (
            jax.jit(prefill, static_argnums=5, **options),
            jax.jit(step, donate_argnums=3, **options),
        )

    def _batch(self, prompts: dict[int, Sequence[int]]) -> tuple[np.ndarray, ...]:
        """Tokens [B, T] with each prompt at the end of its row, lengths [B], row numbers [B].

        Rows are added up to a power of two that the devices share evenly; they hold no token.
        """
        rows = -(-power_of_two(len(prompts)) // self._ways) * self._ways
        longest = max(map(len, prompts.values()))
        tokens_BT = np.zeros((rows, power_of_two(longest, self.buckets.prompt)), np.int32)
        lengths_B, rows_B = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for place, (row, prompt) in enumerate(prompts.items()):
            tokens_BT[place, tokens_BT.shape[1] - len(prompt) :] = prompt
            lengths_B[place], rows_B[place] = len(prompt), row
        return tokens_BT, lengths_B, rows_B

    def _laid(
        self, tokens_BT: np.ndarray, images: Sequence[Sequence[PatchedImage]]
    ) -> RowImages | None:
        """Buffers for the images of a batch's rows, as long as the fullest needs (by powers of 4);
        None where there are none.
        """
        most = max(sum(image.num_patches for image in own) for own in images)
        if not most:
            return None
        vision = self.parts.cfg.vision
        size = self.buckets.patches
        while size < most:
            size *= 4
        filled = [*images, *[()] * (len(tokens_BT) - len(images))]
        rows = [
            row_buffers(tokens, vision.pad_token, own, size, vision.patch)
            for tokens, own in zip(tokens_BT, filled, strict=True)
        ]
        return images_of({name: np.stack([row[name] for row in rows]) for name in rows[0]})

    def _check_images(self, prompts: Sequence[Sequence[int]], images: PromptImages | None) -> None:
        vision = self.parts.cfg.vision
        if images is None:  # a pad without its feature would be read as some word
            images = [()] * len(prompts) if vision.num_layers else None
        if images is None:
            return
        if len(images) != len(prompts):
            raise ConfigError(f"images are of {len(images)} prompts, and {len(prompts)} are given.")
        if not vision.num_layers and any(images):
            raise ConfigError("the model has no vision tower (model.vision): it sees no images.")
        for row, (prompt, own) in enumerate(zip(prompts, images, strict=True)):
            check_pads(np.asarray(prompt), vision.pad_token, own, f"prompt {row}")

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={max_new_tokens} is not allowed: 0 or more.")
        size = self.parts.cfg.vocab_size
        for row, prompt in enumerate(prompts):
            whole = np.ndim(prompt) == 1 and not isinstance(prompt, str)
            if not whole or not np.issubdtype(
                np.asarray(prompt if len(prompt) else [0]).dtype, np.integer
            ):
                raise ConfigError(
                    f"prompt {row} is {prompt!r}: give a list of prompts, each a list of token ids."
                )
            if not len(prompt):
                raise ConfigError(f"prompt {row} is empty: give at least one token.")
            if not 0 <= min(prompt) <= max(prompt) < size:
                wrong = min(prompt) if min(prompt) < 0 else max(prompt)
                raise ConfigError(
                    f"prompt {row} holds token {wrong}; the model knows 0 to {size - 1}."
                )


def _take(row: int, token: int, stop, on_token, out) -> bool:
    """Gives a row its token. False when the row ends: at a stop token, or as `on_token` says."""
    if token in stop:
        return False
    out[row].append(token)
    return not (on_token and on_token(row, token))


class Bundle(Protocol):
    """What :func:`generate` needs of a model: its programs, and its arrays on their mesh."""

    params: dict
    balance: dict

    @property
    def generator(self) -> Generator:
        """The programs, kept from call to call."""
        ...


def generate(
    bundle: Bundle,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
    on_token: OnToken | None = None,
    images: PromptImages | None = None,
) -> list[list[int]]:
    """Continues prompts of token ids.

    Args:
      bundle: the model, as `moejax.load` gives it.
      prompts: token ids of each prompt, at least one.
      max_new_tokens: most tokens a row is given.
      temperature, top_k, top_p, seed: see :class:`Sampling`; temperature 0 is greedy.
      stop: token ids that end a row; they are not part of the result.
      on_token: called with (row, token) as tokens come; what it returns ends the row if true.
      images: of each prompt, which has a pad token (`model.vision.pad_token`) for each feature of
        them in turn; None: no prompt has any.
    Returns:
      The new tokens of every prompt.
    Raises:
      ConfigError: an empty prompt, a token the model does not know, or a setting out of range.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return bundle.generator.generate(
        bundle.params, bundle.balance, prompts, max_new_tokens=max_new_tokens, sampling=sampling,
        stop=frozenset(stop), on_token=on_token, images=images,
    )  # fmt: skip
