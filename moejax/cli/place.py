"""`moejax place`: which device should hold which expert, by the loads that a run recorded."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moejax.cli.flags import Parser, positive
from moejax.cli.tables import Column, print_table, say
from moejax.config import ConfigError
from moejax.config.load import load_config

if TYPE_CHECKING:
    from moejax.observability.loads import Loads

EXAMPLES = (
    "moejax place --workdir=runs/k3",
    "moejax place --workdir=runs/k3 --devices=64 --copies=1 --steps=500 --out=even.json",
    "moejax train --config=kimi_k3 --workdir=runs/k3 --config.placement.file=even.json \\",
    "    --config.placement.copies=1",
)


def main(argv: Sequence[str]) -> int:
    """Writes a placement, and shows the fullest device of every layer before and after."""
    options, overrides = _parser().parse(argv)
    if overrides:
        raise ConfigError(
            "a placement has no --config.FIELD: it is made from what the run has written. Say on "
            "how many devices with --devices=N, and how many copies each may hold with --copies=N."
        )
    if not options.workdir:
        raise ConfigError("--workdir is needed: a run whose config has log.loads_every > 0.")

    from moejax.observability.loads import read_loads
    from moejax.train.placement_file import check_target, write_placement

    folder = pathlib.Path(options.workdir)
    loads = read_loads(folder)
    out = pathlib.Path(
        options.out or (folder if folder.is_dir() else folder.parent) / "placement.json"
    )
    check_target(out)  # before the search, which may take long
    devices = options.devices or _expert_axis(folder)
    _check_devices(devices, loads.counts.shape[-1])
    placement, facts = plan(loads, devices, options.copies, options.steps)
    write_placement(out, placement)
    facts["file"] = str(out)
    if options.json:
        print(json.dumps(facts))
    else:
        _show(facts)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "place",
        what="From the tokens of each expert that a run recorded: a placement of the experts on "
        "devices under which the fullest device of each layer has little more than the mean, as a "
        "file for placement.file. A run with placement.every does the same by itself. Results are "
        "the same under any placement, and checkpoints and exports keep the experts' order.",
        examples=EXAMPLES,
        config=False,
    )
    parser.add_argument("--workdir", metavar="DIR", help="the run, or its expert_loads.jsonl")
    parser.add_argument(
        "--devices", type=positive, metavar="N",
        help="devices that share the experts (default: mesh.expert of the run)",
    )  # fmt: skip
    parser.add_argument(
        "--copies", type=int, default=0, metavar="N",
        help="experts that each device may repeat beside its own, 0 to 64 (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=positive, default=100, metavar="N",
        help="by the loads of the newest N steps (default: 100)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="default: placement.json in the workdir")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _expert_axis(folder: pathlib.Path) -> int:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: say how many devices with --devices=N.")
    devices = load_config(folder).mesh.expert
    if devices < 1:
        raise ConfigError("the run's mesh.expert is -1: say how many devices with --devices=N.")
    return devices


def _check_devices(devices: int, num_experts: int) -> None:
    if num_experts % devices:
        ways = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        near = sorted(sorted(ways, key=lambda n: abs(n - devices))[:4])
        raise ConfigError(
            f"--devices={devices} does not divide {num_experts} experts. Near are "
            f"{', '.join(map(str, near))}."
        )


def plan(loads: Loads, devices: int, copies: int, steps: int) -> tuple[Any, dict[str, Any]]:
    """The placement, and what it does to each layer.

    Args:
      loads: of a run.
      devices: that share the experts.
      copies: that each may hold.
      steps: the newest ones count.
    """
    from moejax.layers.moe.placement import Spread, canonical, device_loads, imbalance, place

    if not 0 <= copies <= 64:
        raise ConfigError(f"--copies={copies} is not allowed: it must be from 0 to 64.")
    load_LE, spread = loads.last(steps), Spread(devices, copies if devices > 1 else 0)
    plain = canonical(len(load_LE), load_LE.shape[1], spread)
    placement = place(load_LE, spread)
    before, after = (imbalance(device_loads(load_LE, p)) for p in (plain, placement))
    busiest = load_LE.max(-1) * devices / load_LE.sum(-1).clip(1)
    used = (placement.copies_LPc < load_LE.shape[1]).sum((1, 2))
    rows = zip(loads.layers, before, after, busiest, used, strict=True)
    names = ("layer", "before", "after", "busiest_expert", "copies")
    facts = {
        "experts": load_LE.shape[1],
        "devices": devices,
        "copies": placement.spread.copies,
        "steps": [int(loads.first[loads.steps > loads.steps[-1] - steps][0]), int(loads.steps[-1])],
        "layers": [
            dict(zip(names, (int(n), float(b), float(a), float(e), int(c)), strict=True))
            for n, b, a, e, c in rows
        ],
        "before": {"max": float(before.max()), "mean": float(before.mean())},
        "after": {"max": float(after.max()), "mean": float(after.mean())},
    }
    return placement, facts


def _show(facts: dict[str, Any]) -> None:
    first, last = facts["steps"]
    say(
        f"{facts['experts']} experts on {facts['devices']} devices by the loads of steps {first} "
        f"to {last}; load of the fullest device over the mean of the devices"
    )
    heads = ("layer", "before", "after", "busiest expert / device mean", "copies")
    rows = [
        (
            str(row["layer"]),
            *(f"{row[name]:.3f}" for name in ("before", "after", "busiest_expert")),
            str(row["copies"]),
        )
        for row in facts["layers"]
    ]
    for name in ("mean", "max"):
        total = str(sum(row["copies"] for row in facts["layers"])) if name == "max" else ""
        rows.append(
            (name, f"{facts['before'][name]:.3f}", f"{facts['after'][name]:.3f}", "", total)
        )
    print_table([Column(right=True)] * len(heads), rows, heads)
    flags = f"--config.placement.file={facts['file']}"
    if facts["copies"]:
        flags += f" --config.placement.copies={facts['copies']}"
    say(f"written: {facts['file']} (train with {flags})")
