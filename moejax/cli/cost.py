"""`moejax cost`: memory, FLOPs, traffic and least time of a step on several hardware at once."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moejax.cli.compile import gib, seconds
from moejax.cli.flags import Parser, add_config, required_config, start_devices
from moejax.cli.tables import Column, print_table, say

if TYPE_CHECKING:
    from moejax.planner.collectives import Collective
    from moejax.planner.estimate import Estimate

EXAMPLES = (
    "moejax cost --config=kimi_k31_lora --hardware=h200:16x8,v5p:4x4x8,b300:1x8",
    "moejax cost --config=kimi_k31_lora --hardware=h200:2x8@expert=16@fsdp=1 \\\n"
    "    --config.model.moe.expert_format=mxfp4 --json",
)

# Terms of the roofline, and what people call them.
_TERMS = {"compute": "compute", "hbm": "memory", "link": "links", "network": "network"}


def main(argv: Sequence[str]) -> int:
    """Estimates and reports. Returns 0."""
    options, overrides = _parser().parse(argv)
    cfg = required_config(options, overrides)
    wanted = _hardware(options.hardware)
    start_devices(argparse.Namespace(platform="cpu", devices=None, multihost=False))
    from moejax.planner.estimate import estimate

    keep = "data.batch_size" in overrides
    found = [estimate(cfg, one, mesh=mesh, keep_batch=keep) for one, mesh in wanted]
    if options.json:
        reports = [as_json(one) for one in found]
        print(json.dumps({"config": cfg.model.name, "hardware": reports}, indent=2))
    else:
        print_report(cfg.model.name, cfg.train.remat, found)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "cost",
        what="What a step of a config costs on each of several hardware, by arithmetic and in "
        "seconds: trained parameters, bytes of a device by what they are, FLOPs of a token, "
        "bytes sent to experts and for weights, and the least time of a step. Nothing is compiled, "
        "so temporaries are not in it; `moejax compile` tells them. A step has one row a device "
        "unless --config.data.batch_size says otherwise. Where the config's mesh does not fit a "
        "hardware's devices, `expert` becomes the largest divisor of theirs and of the experts "
        "that is not above the config's, and `fsdp` the rest; @AXIS=N sets an axis of one "
        "hardware.",
        examples=EXAMPLES,
    )
    add_config(parser)
    parser.add_argument(
        "--hardware", metavar="LIST",
        help="names with commas between them: h100, h200, b200, b300 as hosts x GPUs (h200:16x8); "
        "v5p, v6e, tpu7x by topology in chips (v5p:4x4x8; *2 for two slices); cpu:8; each may end "
        "in axes of its mesh (h200:2x8@expert=16, v5p:4x4x4*2@dcn.fsdp=2)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    return parser


def _hardware(text: str | None) -> list[tuple[Any, dict[str, int]]]:
    """Hardware and the axes that were set for it."""
    from moejax.config import ConfigError
    from moejax.planner.hardware import parse_hardware

    if not text:
        raise ConfigError("--hardware is needed: one or more, as in h200:16x8,v5p:4x4x8.")
    found = []
    for part in text.split(","):
        name, *axes = part.split("@")
        mesh = {}
        for axis in axes:
            key, _, size = axis.partition("=")
            if not size.isdigit() or int(size) < 1:
                raise ConfigError(
                    f"--hardware={part}: {axis!r} sets no axis; write @AXIS=N, as in "
                    "h200:2x8@expert=16."
                )
            mesh[key] = int(size)
        found.append((parse_hardware(name), mesh))
    return found


def as_json(one: Estimate) -> dict[str, Any]:
    """An estimate in plain values; bytes and seconds."""
    plain = dataclasses.asdict(one)
    plain["categories"] = [row._asdict() for row in one.categories]
    return plain | {
        "arguments": one.arguments,
        "flops_per_token": one.flops.model,
        "exchange_bytes_per_token": one.exchange_per_token,
        "tokens_per_s": one.tokens_per_s,
    }


def print_report(name: str, remat: str, found: Sequence[Estimate]) -> None:
    """What is the same everywhere, then a column for each hardware."""
    say(f"a step of {name}, by arithmetic: nothing is compiled", bold=True)
    print_table([Column(), Column(right=True), Column(dim=True)], _everywhere(remat, found[0]))
    say("")
    columns = [Column(), *[Column(right=True)] * len(found)]
    print_table(columns, _by_hardware(found), ["", *(one.hardware for one in found)])
    say("")
    say("Temporaries are not in it: `moejax compile` tells them, and whether a step fits.")
    if any(one.scaled for one in found):
        say("*: the config's mesh does not fit these devices; experts lie over as many as do.")


def _everywhere(remat: str, one: Estimate) -> list[list[str]]:
    flops, share = one.flops, 100 * one.trained / one.parameters
    rows = [
        ["parameters", f"{one.parameters:,}", ""],
        ["  trained", f"{one.trained:,}", f"{share:.3g} %"],
        ["FLOPs a token", f"{flops.model:.4g}", f"{flops.all_trained:.4g} with all trained"],
        ["  forward", f"{flops.forward:.4g}", ""],
        ["  to activations", f"{flops.backward:.4g}", "through frozen weights too"],
        ["  to weights", f"{flops.weights:.4g}", "those that are trained"],
    ]
    if flops.again:
        part = 100 * flops.again / flops.forward
        what = "the forward pass" if part == 100 else f"{part:.0f} % of the forward pass"
        rows.append(["run again", f"{flops.again:.4g}", f"{what}, by remat {remat}"])
    return rows


def _by_hardware(found: Sequence[Estimate]) -> list[list[str]]:
    names = dict.fromkeys(row.name for one in found for row in one.categories)
    shown = [
        _Row("devices", lambda one: f"{one.devices} x {one.device}"),
        _Row("mesh", _mesh),
        _Row("tokens of a step", lambda one: f"{one.rows * one.seq_len:,}"),
        _Row("bytes a device"),
        *(_Row(f"  {name}", _category(name)) for name in names),
        _Row("  together", lambda one: gib(one.arguments)),
        _Row("  of", lambda one: gib(one.available)),
        _Row("  left for temporaries", _left),
        _Row("sent by a device in a step"),
        _Row("  to experts and back, inside", lambda one: _sum(one.exchange, "link_bytes")),
        _Row("  to experts and back, between", lambda one: _sum(one.exchange, "network_bytes")),
        _Row("  weights, gradients, inside", lambda one: _sum(one.weights, "link_bytes")),
        _Row("  weights, gradients, between", lambda one: _sum(one.weights, "network_bytes")),
        _Row("  a token's, to experts and back", lambda one: gib(one.exchange_per_token)),
        _Row("least time of a step"),
        *(_Row(f"  {label}", _term(f"{term}_s")) for term, label in _TERMS.items()),
        _Row("  bound by", lambda one: _TERMS[one.roofline.bound]),
        _Row("  tokens/s at most", lambda one: f"{one.tokens_per_s:,.0f}"),
        _Row("  of one device", lambda one: f"{one.tokens_per_s / one.devices:,.0f}"),
        _Row("  MFU at most", lambda one: f"{100 * one.roofline.mfu:.1f} %"),
        _Row("  MFU, nothing overlapped", lambda one: f"{100 * one.roofline.serial_mfu:.1f} %"),
    ]
    return [[row.label, *map(row.show, found)] for row in shown]


class _Row(NamedTuple):
    """A line of the table: its label, and what stands under each hardware."""

    label: str
    show: Callable[[Estimate], str] = lambda one: ""


def _category(name: str) -> Callable[[Estimate], str]:
    return lambda one: gib(sum(row.device_bytes for row in one.categories if row.name == name))


def _term(name: str) -> Callable[[Estimate], str]:
    return lambda one: seconds(getattr(one.roofline, name))


def _mesh(one: Estimate) -> str:
    axes = [f"{axis} {size}" for axis, size in one.mesh.items() if size > 1]
    return (" x ".join(axes) or "one device") + "*" * one.scaled


def _left(one: Estimate) -> str:
    left = one.available - one.arguments
    return gib(left) if left >= 0 else f"none, {gib(-left)} over"


def _sum(rows: Sequence[Collective], link: str) -> str:
    return gib(sum(getattr(row, link) for row in rows))
