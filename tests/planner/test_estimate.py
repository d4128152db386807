"""The arithmetic of a step agrees with its compilation, and with what is known of Kimi K3.1."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moejax.config import ConfigError, MeshConfig
from moejax.config.load import load_config
from moejax.partitioning.expert_exchange.traffic import Layout, theory
from moejax.planner.aot import compile_for
from moejax.planner.estimate import estimate, fitting_mesh, near_on
from moejax.planner.hardware import parse_hardware, target_config
from moejax.planner.wire import exchange_hops
from tests.cli.conftest import SMALL

LORA = SMALL | {
    "model.ffn.num_dense_layers": 0, "model.moe.num_experts": 8, "mesh.fsdp": 2, "mesh.expert": 4,
    "lora.rank": 8, "lora.targets": "('q_b_proj', 'gate')",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"train.remat": "full"}, marks=pytest.mark.slow),
        pytest.param({"train.remat": "exchange"}, marks=pytest.mark.slow),
        pytest.param({"model.moe.exchange_level": "device"}, marks=pytest.mark.slow),
        pytest.param({"model.moe.expert_format": "mxfp4"}, marks=pytest.mark.slow),
        pytest.param({"lora.base_format": "int8"}, marks=pytest.mark.slow),
        pytest.param(
            {"model.moe.exchange_level": "host", "model.moe.exchange_hosts": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model.moe.exchange_slices": 2, "train.accumulation": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_compiled_is_what_was_estimated(changes):
    """Arguments, FLOPs and rows to experts exactly; gathers where nothing runs twice."""
    cfg, hardware = load_config("tiny", LORA | changes), parse_hardware("cpu:8")
    here, compiled = estimate(cfg, hardware), compile_for(cfg, hardware)
    assert here.categories == compiled.categories
    assert here.arguments + 4 == compiled.memory.arguments  # and the step's number
    assert here.flops.model == pytest.approx(compiled.flops_per_token, rel=1e-12)
    assert (here.rows, here.mesh, here.devices) == (compiled.rows, compiled.mesh, 8)

    def sent(rows, kind):
        return sum(row.sent_bytes for row in rows if row.kind == kind and not row.open_loop)

    assert sent(here.exchange, "all-to-all") == sent(compiled.collectives, "all-to-all") > 0
    if not {"train.remat", "train.accumulation"} & changes.keys():
        # Else one layer's second gather is the first one to a compiler.
        assert sent(here.weights, "all-gather") == sent(compiled.collectives, "all-gather") > 0


@pytest.fixture(scope="module")
def headline():
    """K3.1 LoRA on the hardware that it was compiled for, bfloat16 and MXFP4 experts."""
    cfg = load_config("kimi_k31_lora", {})
    packed = load_config("kimi_k31_lora", {"model.moe.expert_format": "mxfp4"})
    return (
        estimate(cfg, parse_hardware("h200:16x8")),
        estimate(packed, parse_hardware("h200:2x8")),
    )


def test_the_headline(headline):
    whole, packed = headline
    assert whole.trained == packed.trained == 27_414_528
    assert (whole.mesh["fsdp"], whole.mesh["expert"], whole.scaled) == (2, 64, False)
    assert (packed.mesh["fsdp"], packed.mesh["expert"], packed.scaled) == (1, 16, True)
    # Arguments as they were compiled.
    gib = 2**30
    assert whole.arguments / gib == pytest.approx(40.7, abs=0.05)
    assert packed.arguments / gib == pytest.approx(91.0, abs=0.05)
    # 92 layers x 4,096 tokens x 16 experts x 3584 numbers of 2 bytes, there and back, three times.
    sent = 92 * 4096 * 16 * 3584 * 2 * 2 * 3
    (rows,) = whole.exchange
    assert rows.sent_bytes == pytest.approx(sent * 63 / 64, rel=1e-9)
    assert rows.network_bytes == pytest.approx(sent * 56 / 64, rel=1e-9)
    assert whole.exchange_per_token == pytest.approx(rows.sent_bytes / 4096)
    # Gathers of the K3.1 step compiled for 128 GPUs: 177.9 + 23.8 + 81.4 + 1.95 + 0.25 GiB.
    gathers = sum(row.sent_bytes for row in whole.weights if row.kind == "all-gather")
    assert gathers / gib == pytest.approx(285.3, rel=0.001)
    assert whole.roofline.bound == "network"


def test_frozen_weights_have_no_gradients(headline):
    """Two FLOPs a weight forward, two to activations, two only for what is trained."""
    flops = headline[0].flops
    assert flops.weights == 2 * 27_414_528
    assert flops.model == flops.forward + flops.backward + flops.weights
    assert flops.again == flops.forward and flops.all_trained == 3 * flops.forward
    assert 0.66 < flops.model / flops.all_trained < 0.68
    assert headline[0].roofline.compute_s == pytest.approx(
        (flops.model + flops.forward) * 4096 / 989.4e12
    )


def test_flops_of_full_training_are_all_trained():
    cfg = load_config("tiny", SMALL)
    here = estimate(cfg, parse_hardware("cpu:8"))
    assert here.flops.model == pytest.approx(here.flops.all_trained, rel=1e-12)
    assert here.parameters == here.trained
    assert here.flops.again == 0


@pytest.mark.parametrize("level", ["expert", "device", "host"])
def test_rows_of_every_level_are_those_counted(level):
    """As the table of `expert_exchange.traffic`, which agrees with counted exchanges."""
    layout = Layout(hosts=4, near=4, num_experts=64, top_k=4, width=8)
    moe = {
        "model.moe.exchange_level": level, "model.moe.exchange_hosts": 4,
        "model.moe.num_experts": 64, "model.moe.top_k": 4,
    }  # fmt: skip
    hops = exchange_hops(load_config("tiny", moe), layout.devices)
    off = sum(hop.rows * (1 - 1 / hop.ranks) for hop in hops)
    across, near = hops[0].rows, 1 - 1 / layout.hosts
    expected = theory(layout, np.full(64, 1 / 64), level)
    assert (off, across * near) == pytest.approx(expected, rel=2e-3)


def test_experts_of_a_smaller_machine_lie_over_as_many_as_fit():
    cfg = load_config("kimi_k31_lora", {})
    for devices, expert in ((128, 64), (96, 32), (24, 8), (14, 14), (8, 8), (1, 1), (3, 1)):
        mesh, scaled = fitting_mesh(cfg, devices, {})
        sizes = mesh.sizes(devices)
        assert (sizes["expert"], sizes["fsdp"]) == (expert, devices // expert)
        assert scaled == (devices != 128)
    mesh, scaled = fitting_mesh(cfg, 16, {"expert": 8, "dcn.fsdp": 2})
    assert (mesh.expert, mesh.fsdp, mesh.dcn.fsdp, scaled) == (8, 2, 2, False)


@pytest.mark.parametrize(
    ("hardware", "mesh", "near"),
    [
        ("h200:4x4", {"fsdp": 2, "expert": 8}, (1, 4)),
        ("h200:2x8", {"fsdp": 4, "expert": 4}, (2, 4)),
        ("h200:2x8", {"fsdp": 2, "expert": 8, "dcn.expert": 2}, (2, 4)),
        ("v5p:2x2x4", {"fsdp": 2, "expert": 8}, (2, 8)),
        ("v5p:2x2x2*2", {"fsdp": 2, "expert": 8, "dcn.fsdp": 2}, (1, 8)),
        ("cpu:8", {"fsdp": 2, "expert": 4, "dcn.expert": 2}, (2, 2)),
    ],
)
def test_neighbours_without_devices(hardware, mesh, near):
    cfg = load_config("tiny", {"mesh.fsdp": 1, "mesh.expert": 1})
    asked, devices = parse_hardware(hardware), math.prod((mesh["fsdp"], mesh["expert"]))
    laid, _ = fitting_mesh(cfg, devices, mesh)
    found = near_on(asked, laid, laid.sizes(devices))
    assert (found["fsdp"], found["expert"]) == near


def test_slices_need_an_axis_between_them():
    sizes = MeshConfig(fsdp=2, expert=8).sizes(16)
    with pytest.raises(ConfigError, match=r"has 2 slices, mesh\.dcn asks for 1.*mesh\.dcn\.fsdp=2"):
        near_on(parse_hardware("v5p:2x2x2*2"), MeshConfig(fsdp=2, expert=8), sizes)


def test_what_xla_does_not_know_is_only_estimated():
    with pytest.raises(ConfigError, match=r"XLA knows no B300 yet; `moejax cost`"):
        target_config(parse_hardware("b300:1x8").chip)
    cfg = load_config("kimi_k31_lora", {"model.moe.expert_format": "mxfp4"})
    here = estimate(cfg, parse_hardware("b300:1x8"))
    assert here.arguments < here.available and here.roofline.bound == "compute"
