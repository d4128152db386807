"""What becomes of the layers' results, as a table: `config --memory`, `compile` and `train`."""

from __future__ import annotations

from moejax.cli.tables import Column, print_table, say
from moejax.memory.names import KNOWN
from moejax.memory.swap_core import Plan


def print_plan(plan: Plan, tokens: int, *, timed: bool) -> None:
    """Every result, what it weighs and what becomes of it; then what all of it comes to.

    Args:
      plan: the plan.
      tokens: of a device and microbatch.
      timed: also times and reasons, which need hardware.
    """
    say("results of the layers until the backward pass, by name", bold=True)
    header = ["name", "kind", "layers", "bytes/token", "again/token", "a device"]
    header += ["copy", "again", "choice", "reason"] if timed else ["policy", "what"]
    rows = []
    for one in plan.decisions:
        layers = max(one.layers, 1)
        row = [
            one.name, KNOWN[one.name].kind, str(one.layers), f"{one.size / tokens / layers:,.0f}",
            _flops(one.flops / tokens / layers), _size(one.size),
        ]  # fmt: skip
        if timed:
            row += [_ms(one.copy_s), _ms(one.again_s), one.choice, one.reason]
        else:
            row += [one.choice, KNOWN[one.name].what]
        rows.append(row)
    right = Column(right=True)
    columns = [Column(), Column(dim=True), right, right, right, right]
    columns += [right, right] if timed else []
    print_table([*columns, Column(), Column(dim=True)], rows, header)
    for line in plan_lines(plan, tokens, timed=timed):
        say(line)
    say("")


def plan_lines(plan: Plan, tokens: int, *, timed: bool) -> list[str]:
    """What a plan comes to."""
    again, full = plan.flops / tokens, plan.flops_full / tokens
    lines = [
        f"kept {_size(plan.kept_bytes)} of a device and microbatch, on the host "
        f"{_size(plan.offloaded_bytes)} (through {_size(plan.staged_bytes)} of the device)",
        f"computed again: {_flops(again)} a token of {_flops(full)} under full recomputation: "
        f"{100 * plan.saved_share:.0f} % saved",
    ]
    if timed:
        lines.append(
            f"at the data sheet's rates: forward {_ms(plan.forward_s)}, backward "
            f"{_ms(plan.backward_s)}, again {_ms(plan.again_s)}, copies that no compute hides "
            f"{_ms(plan.exposed_s)}"
        )
    return lines


def _size(count: float) -> str:
    return f"{count / 2**20:.2f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


def _ms(value: float) -> str:
    return f"{1e3 * value:,.2f} ms"


def _flops(value: float) -> str:
    for unit, size in (("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} FLOP"
