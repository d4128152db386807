"""Text as it is generated: whole characters, and nothing from a stop text on."""

from __future__ import annotations

from collections.abc import Sequence

from moejax.data import StreamDecoder, Tokenizer


class TextStream:
    """The text of one row, token by token.

    What `push` and `flush` give, joined, is the text up to the stop text that is complete first.
    Text that may be the beginning of one waits until that is decided.

    Attributes:
      ended: whether a stop text was reached.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._decoder = StreamDecoder(tokenizer)
        self._stops = tuple(stop for stop in stops if stop)
        self._waiting = ""
        self.ended = False

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        return self._give(self._decoder.push(token))

    def flush(self) -> str:
        """The rest of the text, when no token follows."""
        given = self._give(self._decoder.flush())
        rest, self._waiting = self._waiting, ""
        return given if self.ended else given + rest

    def _give(self, text: str) -> str:
        if self.ended:
            return ""
        text = self._waiting + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops]
        found = [(end, start) for end, start in found if start >= 0]
        if found:
            self.ended, self._waiting = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may begin `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
