"""The loss at full size: K3's head, 131,072 tokens a device, less than a GiB beside its results."""

import pytest

from moejax.planner.loss_memory import loss_memory

GIB = 2**30


@pytest.mark.aot
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("hardware", ["h200:1x8", "v5p:2x2x2"])
def test_temporaries_of_the_loss_stay_within_a_gibibyte(hardware, trained):
    found = loss_memory(
        hardware, rows=131_072, vocab=163_840, dim=7168, trained=trained, budget=GIB
    )
    assert not found.plan.whole_head
    assert 0 < found.temporaries < GIB
    assert found.results >= 131_072 * 7168 * 2  # the rows' gradient is a result, and whole
