"""Text as the tokens that a model is asked about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moejax.config import ConfigError, VisionConfig
from moejax.data import Tokenizer
from moejax.data.image_marks import ImageRef
from moejax.data.image_texts import ImageRules
from moejax.data.patches import PatchedImage
from moejax.generate.scoring import ScoredRow


def prefix_token(tokenizer: Tokenizer) -> int:
    """The token that begins a text, or ends one where there is no other."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt, names of special tokens read as such; of an empty one its prefix."""
    return tokenizer.encode(text, specials=True).tolist() or [prefix_token(tokenizer)]


def image_prompt(
    tokenizer: Tokenizer, text: str, files: Sequence[str | ImageRef], vision: VisionConfig,
    *, style: str = "auto",
) -> tuple[list[int], list[PatchedImage]]:  # fmt: skip
    """A prompt with images in front of its text.

    Args:
      tokenizer: of the model.
      text: what follows them; may be empty.
      files: of the images.
      vision: section of the model's tower; its limits decide how far images are shrunk.
      style: how an image stands in a text, see `data.image_style`.
    Returns:
      Token ids, and the images as `moejax.generate.generate` takes them.
    Raises:
      ConfigError: the model has no tower, or a file is no image that can be used.
    """
    if not files:
        return prompt_ids(tokenizer, text), []
    if not vision.num_layers:
        raise ConfigError("the model has no vision tower (model.vision): it sees no images.")
    rules = ImageRules(vision, tokenizer, style)
    refs = [file if isinstance(file, ImageRef) else ImageRef(file) for file in files]
    stand = [rules.tokens(ref) for ref in refs]
    ids = [token for one in stand for token in one.ids.tolist()]
    text_ids = tokenizer.encode(text, specials=True).tolist() if text else []
    return ids + text_ids, [rules.load(one) for one in stand]


def continuation_row(
    tokenizer: Tokenizer, context: str, continuation: str, max_length: int, *, bos: bool = False
) -> ScoredRow:
    """A context and its continuation as one row that scores the continuation.

    The border is where lm-evaluation-harness has it: spaces at the context's end go over to the
    continuation, the whole is encoded, and split at the number of the context's own tokens. What is
    too long loses tokens at the left.

    Args:
      tokenizer: whose tokens they are.
      context: an empty one becomes the prefix token.
      continuation: the text that is scored.
      max_length: most tokens that may be fed.
      bos: put the tokenizer's begin token in front, if it has one.
    Raises:
      ConfigError: no token is left to score, or more than `max_length` are.
    """
    if context.strip():
        border = len(context.rstrip())
        whole = tokenizer.encode(context + continuation, specials=True).tolist()
        first = len(tokenizer.encode(context[:border], specials=True))
        if bos and tokenizer.bos_id is not None and whole[:1] != [tokenizer.bos_id]:
            whole, first = [tokenizer.bos_id, *whole], first + 1
    else:
        whole = tokenizer.encode(context + continuation, specials=True).tolist()
        begin = prefix_token(tokenizer)
        whole, first = (whole if whole[:1] == [begin] else [begin, *whole]), 1
    count = len(whole) - first
    if not 1 <= count <= max_length:
        raise ConfigError(
            f"the continuation {continuation[:40]!r} has {count} tokens behind its context; it "
            f"must have 1 to {max_length}."
        )
    row = np.asarray(whole[-(max_length + 1) :], np.int32)
    return ScoredRow(row, len(row) - count)
