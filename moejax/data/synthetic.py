"""Generated text with structure to learn: a small grammar, and sums whose results are right."""

from __future__ import annotations

import numpy as np

_ADJECTIVES = ("red", "small", "quiet", "old", "quick", "green", "tall", "kind")
_ANIMALS = ("fox", "hare", "crow", "otter", "badger", "heron", "mouse", "lynx")
_VERBS = ("sees", "follows", "greets", "hides from", "waits for", "finds")
_PLACES = ("by the river", "under the oak", "on the hill", "near the mill")


def synthetic_document(index: int, seed: int = 0) -> str:
    """Document `index` of the stream that `seed` names: 4 to 19 lines of ASCII text.

    Raw words of the Philox generator are drawn, whose values NumPy promises never to change.
    """
    words = iter(np.random.Philox(np.random.SeedSequence([seed, index])).random_raw(200).tolist())
    num_lines = 4 + next(words) % 16
    return "".join(_line(words) for _ in range(num_lines))


def _line(words) -> str:
    """One sum, or one sentence that names its animal twice; takes at most 7 words."""
    if next(words) % 2:
        a, b = next(words) % 50, next(words) % 50
        return f"{a} plus {b} is {a + b}.\n"
    adjective, animal, verb, other, place = (
        options[next(words) % len(options)]
        for options in (_ADJECTIVES, _ANIMALS, _VERBS, _ANIMALS, _PLACES)
    )
    return f"the {adjective} {animal} {verb} a {other} {place}. the {animal} is {adjective}.\n"
