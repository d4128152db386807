"""Text out of token ids one by one, in whole characters."""

import codecs
from typing import Any

import numpy as np


class StreamDecoder:
    """Decodes ids as they come; what it gives, joined, is `tokenizer.decode` of all of them.

    A character whose bytes are spread over several tokens is given with its last one. Where a
    tokenizer decides a character's bytes only at the next plain token (the byte tokens of
    sentencepiece-like files, of which one bad byte spoils the whole run), the text waits for it.

    Args:
      tokenizer: anything with `decode`. One with `is_bytewise` and `token_bytes` costs the same
        for every token; others decode the last few ids anew at every step.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._bytewise = getattr(tokenizer, "is_bytewise", False)
        self._is_open = getattr(tokenizer, "continues_bytes", lambda token: False)
        self._reset()

    def _reset(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Ids that give the ones behind them their context, then ids not given yet.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that is settled by this id; empty while a character is unfinished."""
        if self._bytewise:
            return self._utf8.decode(self._tokenizer.token_bytes(int(token)))
        self._pending.append(int(token))
        return "" if self._is_open(int(token)) else self._settled(final=False)

    def flush(self) -> str:
        """The rest of the text, an unfinished character as U+FFFD; then a new text may begin."""
        if self._bytewise:
            rest = self._utf8.decode(b"", final=True)
        else:
            rest = self._settled(final=True)
        self._reset()
        return rest

    def _settled(self, *, final: bool) -> str:
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        # A context without text of its own may be blanks that a decoder strips at the front: it
        # must not become the front.
        if self._decode(self._pending):
            self._context = self._pending
        else:
            self._context = self._context + self._pending
        self._pending = []
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(np.asarray(ids, np.int32))
