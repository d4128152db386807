"""`moejax cost`: a column for each hardware, JSON, one-line errors."""

from __future__ import annotations

import json

import pytest

from tests.planner.test_estimate import LORA


def test_the_command_shows_a_column_for_each_hardware(moejax):
    flags = [f"--config.{name}={value}" for name, value in LORA.items() if "batch" not in name]
    both = "--hardware=cpu:8,h200:2x8@expert=8@fsdp=2"
    shown = moejax("cost", "--config=tiny", both, *flags)
    assert shown.code == 0 and not shown.err
    for part in (
        "cpu:8", "h200:2x8", "16 x H200 SXM", "fsdp 2 x expert 8", "adapters", "optimizer state",
        "to activations", "to experts and back, between", "tokens/s at most", "bound by",
        "`moejax compile` tells them",
    ):  # fmt: skip
        assert part in shown.out
    read = json.loads(moejax("cost", "--config=tiny", both, *flags, "--json").out)
    first, second = read["hardware"]
    assert (first["hardware"], second["mesh"]["expert"]) == ("cpu:8", 8)
    assert first["arguments"] == sum(one["device_bytes"] for one in first["categories"])
    assert second["tokens_per_s"] == 16 * 32 / second["roofline"]["step_s"]


@pytest.mark.parametrize(
    ("hardware", "says"),
    [
        ("", "--hardware is needed"),
        ("h200:2x8,a100:1x8", "unknown hardware 'a100'"),
        ("h200:2x8@expert", "'expert' sets no axis; write @AXIS=N"),
        ("h200:2x8@experts=2", "'experts' is no axis of a mesh"),
        ("h200:2x8@expert=3", "does not fit 16 devices"),
        ("v5p:2x2x2*2", "mesh.dcn asks for 1. What fits"),
    ],
)
def test_errors_are_one_line(moejax, hardware, says):
    shown = moejax("cost", "--config=tiny", f"--hardware={hardware}")
    assert shown.code == 2 and not shown.out
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and says in shown.err
