"""The table of what each level sends: theory against known laws, counts against theory."""

import math

import numpy as np
import pytest

from moejax.partitioning.expert_exchange.levels import LEVELS, even_copies
from moejax.partitioning.expert_exchange.traffic import (
    Layout,
    _parser,
    choices,
    count,
    groups_hit,
    table,
    theory,
)

SMALL = Layout(hosts=2, near=4, num_experts=32, top_k=6, width=64)


def test_help_tells_every_option_with_its_default():
    shown = " ".join(_parser(SMALL).format_help().split())
    assert "Runs the ragged exchange" in shown and "example" in shown
    for option, value in (("hosts", 2), ("devices-per-host", 4), ("experts", 32), ("top-k", 6)):
        assert f" --{option} N" in shown and f"(default: {value})" in shown
    assert shown.count("(default: ") == 6


def test_equal_shares_are_the_hypergeometric_law():
    for experts, groups, top_k in ((32, 8, 6), (30, 5, 1), (12, 3, 11)):
        got = groups_hit(np.full(experts, 1 / experts), groups, top_k)
        assert got == pytest.approx(even_copies(experts, groups, top_k), rel=3e-4)


@pytest.mark.parametrize("zipf", [0.0, 1.5])
def test_counts_are_what_theory_says(zipf):
    """Within what chance allows for 8 x 300 tokens; a row that is sent twice or not would be seen.

    At level "expert" every row is known, so the count is exact.
    """
    tokens = 300
    ids, share_E = choices(SMALL, tokens, zipf)
    for level in LEVELS:
        stats = count(SMALL, ids, level)
        rows, far = stats.sent_rows / tokens, stats.network_rows / tokens
        want, want_far = theory(SMALL, share_E, level)
        slack = 5 * SMALL.top_k / math.sqrt(8 * tokens) / 4
        assert abs(rows - want) < slack and abs(far - want_far) < slack, level
        # Rows both ways with weights and ids on the way there; of the counts a trifle.
        there = 2 * SMALL.width + (0 if level == "expert" else 8 * SMALL.top_k)
        payload = stats.sent_rows * (there + 2 * SMALL.width)
        assert payload <= stats.sent_bytes <= payload + 7 * 4 * 32 * 4


@pytest.mark.slow
def test_the_table_has_a_line_a_level():
    lines = table(SMALL, 20, (0.0,)).splitlines()
    assert len(lines) == 2 + len(LEVELS)
    assert [line.split("|")[2].strip(" `") for line in lines[2:]] == list(LEVELS)
    assert len({line.count("|") for line in lines}) == 1
