"""Where chosen keys are masked and where they are gathered, by length and chip."""

import pytest

from pallas_kernels.choose import lowering_for
from pallas_kernels.sparse_flash_attention import break_even, crossover

K31 = {"top_k": 2048, "H": 192, "h": 128, "C": 512, "R": 64}


def test_equal_work_is_where_the_widths_say():
    """K3.1: 2 * 96 * 320 operations a visible key, 2 * 96 * 1088 a chosen one."""
    with lowering_for("gpu", "h200"):
        on_h200 = crossover(**K31)
    dense = 96 * 2 * 320 * on_h200 / 2
    sparse = 96 * 2 * 1088 * 2048 * 4 / 3
    assert abs(dense / sparse - 1) < 1e-3
    assert 8192 < on_h200 < 32768  # 8 K rows are masked, 32 K gathered


def test_a_row_of_chosen_keys_alone_is_never_gathered():
    assert crossover(64, H=4096, h=4096, C=16, R=0) == 64


def test_chips(monkeypatch):
    """The lowering's platform decides, or the chip; a TPU has no kernel for rows: masks longest."""
    lengths = {}
    for platform in ("cpu", "gpu", "tpu"):
        with lowering_for(platform):
            lengths[platform] = crossover(**K31)
    assert lengths["gpu"] < lengths["cpu"] < lengths["tpu"]
    monkeypatch.setitem(break_even.SLOWDOWN, "b200", 3.0)
    with lowering_for("gpu", "nvidia b200"):
        assert crossover(**K31) > 2 * lengths["gpu"]


@pytest.mark.parametrize(
    ("names", "platform"),
    [
        (("h100", "H200", "NVIDIA H200", "b200", "gb200"), "gpu"),
        (("v5p", "TPU v5p", "tpu7x"), "tpu"), (("cpu",), "cpu"),
    ],
)  # fmt: skip
def test_a_named_chip_counts_as_its_platform(names, platform):
    with lowering_for(platform):
        expected = crossover(**K31)
    assert {crossover(**K31, chip=name) for name in names} == {expected}


def test_a_chip_with_its_own_line_is_found_by_both_its_names():
    of_v6e = {crossover(**K31, chip=name) for name in ("v6e", "TPU v6 lite")}
    with lowering_for("tpu", "tpu v6 lite"):
        of_v6e.add(crossover(**K31))
    assert len(of_v6e) == 1 and of_v6e.pop() < crossover(**K31, chip="v5p")


@pytest.mark.parametrize("chip", ["banana", "", 7])
def test_an_unknown_chip_is_refused(chip):
    with pytest.raises(ValueError, match="is unknown. Use one of h100, h200"):
        crossover(**K31, chip=chip)


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="h=0; give an integer from 1"):
        crossover(8, H=4, h=0, C=8, R=0)
