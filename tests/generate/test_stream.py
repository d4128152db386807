"""Streamed text: whole characters, and nothing from a stop text on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data import ByteTokenizer
from moejax.generate import TextStream

TOKENIZER = ByteTokenizer()


def streamed(text: str, stops=()) -> tuple[list[str], bool]:
    """What every token gives, and the rest."""
    stream = TextStream(TOKENIZER, stops)
    given = []
    for token in TOKENIZER.encode(text):
        given.append(stream.push(token))
        if stream.ended:
            break
    return [*given, stream.flush()], stream.ended


def first_stop(text: str, stops) -> tuple[str, bool]:
    """Letter by letter: the text before the stop that ends first, the longest of several."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    st.text(alphabet="ab\né漢😀", max_size=30),
    st.lists(st.text(alphabet="ab\né漢😀", min_size=1, max_size=4), max_size=3),
)
def test_the_parts_joined_are_the_text_up_to_the_stop_that_ends_first(text, stops):
    parts, ended = streamed(text, stops)
    assert ("".join(parts), ended) == first_stop(text, stops)


def test_text_comes_as_soon_as_it_is_certain():
    assert streamed("né")[0] == ["n", "", "é", ""]
    assert streamed("a\nb\n\nc", ["\n\n"])[0] == ["a", "", "\nb", "", "", ""]
    assert streamed("a\n", ["\n\n"])[0] == ["a", "", "\n"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_never_ends_is_marked_once(cut):
    stream = TextStream(TOKENIZER)
    tokens = TOKENIZER.encode("😀")[:cut]
    assert [stream.push(token) for token in tokens] == [""] * cut
    assert stream.flush() == TOKENIZER.decode(np.asarray(tokens)) == "\N{REPLACEMENT CHARACTER}"
