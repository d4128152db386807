"""Where chosen keys are masked and where they are gathered, by length and chip."""

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
