"""`moejax compile`: the train step compiled for hardware that is not here; does it fit?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moejax.cli.flags import Parser, add_config, positive, required_config, start_devices
from moejax.cli.tables import Column, print_table, say

if TYPE_CHECKING:
    from moejax.planner.aot import CompileReport
    from moejax.planner.tower import Tower

EXAMPLES = (
    "moejax compile --config=tiny --hardware=cpu:8 --run",
    "moejax compile --config=kimi_linear_48b --hardware=h200:8x8",
    "moejax compile --config=kimi_k31 --hardware=v5p:4x4x8 --config.mesh.fsdp=2 --json",
    "moejax compile --config=kimi_linear_48b --hardware='v5p:4x4x4*2' --config.mesh.dcn.fsdp=2",
)
_DOES_NOT_FIT = 3


def main(argv: Sequence[str]) -> int:
    """Compiles and reports. Returns 0 where the step fits the devices' memory, 3 where not."""
    options, overrides = _parser().parse(argv)
    cfg = required_config(options, overrides)
    hardware = _hardware(options)
    # Only a compiler is needed: no accelerator is taken from whoever uses it.
    # XLA's own log repeats what its error says, or warns of memory that the report tells about.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read once, when JAX starts
    simulated = hardware.shape[0] if hardware.chip.platform == "cpu" else None
    start_devices(argparse.Namespace(platform="cpu", devices=simulated, multihost=False))
    from moejax.planner.aot import compile_for

    report = compile_for(
        cfg,
        hardware,
        keep_batch="data.batch_size" in overrides,
        num_buffers=options.buffers or 0,
        with_overlap=options.overlap,
        run=options.run,
    )
    if options.json:
        print(json.dumps(as_json(cfg.model.name, report), indent=2))
    else:
        print_report(cfg.model.name, report)
    return 0 if report.fits else _DOES_NOT_FIT


def _parser() -> Parser:
    parser = Parser(
        "compile",
        what="Compiles the train step of a config for accelerators that are not here, and tells "
        "whether it fits them: compile time, memory of a device, collectives and what they send "
        "over each mesh axis, and the least time of a step. Nothing is allocated. The mesh is the "
        "config's; a step has one row a device unless --config.data.batch_size says otherwise. "
        "Exit code 0: it fits; 3: it does not. For GPUs and TPUs it needs "
        "`pip install 'moejax[aot]'`.",
        examples=EXAMPLES,
    )
    add_config(parser)
    parser.add_argument(
        "--hardware", metavar="NAME:SHAPE",
        help="h100, h200, b200 as hosts x GPUs (h200:16x8); v5p, v6e, tpu7x by topology in chips "
        "(v5p:4x4x8; v5p:4x4x8*2 for two slices); cpu:8 for simulated devices",
    )  # fmt: skip
    parser.add_argument(
        "--buffers", type=positive, metavar="N",
        help="also the N largest temporaries of the fullest moment, and what they are",
    )  # fmt: skip
    parser.add_argument(
        "--overlap", action="store_true",
        help="also which collectives have compute beside them in the compiled schedule",
    )  # fmt: skip
    parser.add_argument(
        "--run", action="store_true",
        help="of simulated devices (cpu:8): also run the step, and show measured memory and "
        "collectives beside the compiled ones",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    return parser


def _hardware(options: argparse.Namespace):
    from moejax.config import ConfigError
    from moejax.planner.hardware import parse_hardware

    if not options.hardware:
        raise ConfigError(
            "--hardware is needed: h200:16x8 (hosts x GPUs), v5p:4x4x8 (topology), or cpu:8."
        )
    return parse_hardware(options.hardware)


def as_json(name: str, report: CompileReport) -> dict[str, Any]:
    """The report in plain values; bytes and seconds."""
    plain = dataclasses.asdict(report)
    plain["categories"] = [one._asdict() for one in report.categories]
    return {"config": name, "fits": report.fits, **plain}


def print_report(name: str, report: CompileReport) -> None:
    """What was compiled, then memory, collectives and the least time of a step; `fits` last."""
    say(f"train step of {name} on {report.devices} x {report.device} ({report.links})", bold=True)
    print_table([Column(), Column(right=True), Column(dim=True)], _facts(report))
    for line in report.kernels:
        say(f"  {line}")
    if report.collectives:
        say("")
        say(
            "collectives: what a device sends in a step inside hosts or slices, and between them",
            bold=True,
        )
        _print_collectives(report)
    if report.overlap:
        say("")
        say(_hidden(report), bold=True)
        _print_overlap(report)
    if report.measured:
        say("")
        say("run for real: what a device holds and sends in a step", bold=True)
        _print_measured(report)
    if report.buffers:
        say("")
        say("largest temporaries of the fullest moment", bold=True)
        rows = [[gib(one.size), one.type.partition("{")[0], one.source] for one in report.buffers]
        print_table([Column(right=True), Column(), Column(dim=True)], rows)
    if report.roofline:
        say("")
        say("least time of a step", bold=True)
        print_table([Column(), Column(right=True), Column(dim=True)], _times(report))
    if report.plan is not None:
        say("")
        from moejax.cli.memory_table import print_plan  # imports jax

        print_plan(report.plan, report.microbatch_tokens, timed=True)
        say(f"peak: predicted {gib(report.predicted)}, compiled {gib(report.memory.peak)}")
    say("")
    memory = report.memory
    share = f"{gib(memory.peak)} of {gib(memory.available)} a device"
    say(f"fits: {'yes' if report.fits else 'no'} ({share})", bold=True)
    if report.refused:
        say(f"the compiler: {report.refused[:300]}")


def _facts(report: CompileReport) -> list[list[str]]:
    memory = report.memory
    rows = [
        ["rows", f"{report.rows:,}", f"of {report.seq_len:,} tokens"],
        ["compile", f"{report.compile_s:.1f} s", f"{gib(report.host_bytes)} of host memory"],
    ]
    rows += [[f"  {one.name}", gib(one.device_bytes), ""] for one in report.categories]
    if not report.refused:
        rows[2:2] = [["arguments", gib(memory.arguments), "a device: state and batch"]]
        rows += [
            ["outputs", gib(memory.outputs), f"{gib(memory.aliased)} of it over the arguments"],
            ["temporaries", gib(memory.temporaries), ""],
        ]
    rows.append(["peak", gib(memory.peak), f"of {gib(memory.available)}"])
    if memory.program:
        rows.append(["program", gib(memory.program), "of instructions, beside the peak"])
    if memory.host:
        rows.append(["host", gib(memory.host), "of the host's memory for each of its devices"])
    trained = sum(
        one.values for one in report.categories if one.name.startswith(("adapters", "trained"))
    )
    rows.append(["trained", f"{trained:,}", "parameters"])
    rows.append(["FLOPs a token", f"{report.flops_per_token:.4g}", "forward and backward"])
    return rows + (_tower(report.tower) if report.tower else [])


def _tower(tower: Tower) -> list[list[str]]:
    share = f"FLOPs a device, {100 * tower.share:.2f} % of the step: the same on every device"
    return [
        ["images", f"{tower.patches:,}", "patches a device: every row has a buffer of its own"],
        ["  tower", f"{tower.flops:.4g}", share],
        ["  its weights", gib(tower.weight_bytes), f"at use; {gib(tower.stored_bytes)} stored"],
        ["  features", gib(tower.feature_bytes), "a device, where they are made"],
        ["  buffers", gib(tower.batch_bytes), "of the batch"],
    ]


def _print_collectives(report: CompileReport) -> None:
    header = ["kind", "mesh axes", "group", "count", "operands", "inside", "between", ""]
    rows = [
        [
            row.kind, row.axes, str(row.group), f"{row.count:,}", gib(row.operand_bytes),
            gib(row.link_bytes), gib(row.network_bytes),
            "one pass of a loop of unknown length" if row.open_loop else "",
        ]
        for row in report.collectives
    ]  # fmt: skip
    right = Column(right=True)
    columns = [Column(), Column(), right, right, right, right, right, Column(dim=True)]
    print_table(columns, rows, header)


def _print_measured(report: CompileReport) -> None:
    header = ["", "compiled", "measured", "ratio", "runs compiled", "runs measured", ""]
    rows = [
        [
            row.what, gib(row.compiled), gib(row.measured),
            f"{row.measured / row.compiled:.3f}" if row.compiled else "-",
            f"{row.compiled_runs:g}" if row.compiled_runs else "",
            f"{row.measured_runs:g}" if row.compiled_runs else "",
            "a loop of unknown length, compiled for one pass" if row.open_loop else "",
        ]
        for row in report.measured
    ]  # fmt: skip
    print_table([Column(), *[Column(right=True)] * 5, Column(dim=True)], rows, header)


def _hidden(report: CompileReport) -> str:
    from moejax.planner.overlap import hidden_share

    wire = sum(row.seconds for row in report.overlap)
    exposed = sum(row.exposed_s for row in report.overlap)
    looped = [row for row in report.overlap if row.in_loop and row.sent_bytes]
    in_loops = f"{100 * hidden_share(looped):.0f} % in the loops over layers"
    return (
        f"sent beside compute: {100 * hidden_share(report.overlap):.0f} % of the bytes, "
        f"{in_loops if looped else 'none are sent in loops over layers'}; of {seconds(wire)} on "
        f"the wire {seconds(exposed)} are exposed"
    )


def _print_overlap(report: CompileReport) -> None:
    header = ["kind", "mesh axes", "where", "count", "sent", "async", "hidden", "wire", "exposed"]
    rows = [
        [
            row.kind, row.axes, "loops" if row.in_loop else "once", f"{row.count:,}",
            gib(row.sent_bytes), _percent(row.async_bytes, row.sent_bytes),
            _percent(row.hidden_bytes, row.sent_bytes), seconds(row.seconds),
            seconds(row.exposed_s),
        ]
        for row in report.overlap
    ]  # fmt: skip
    print_table([Column()] * 3 + [Column(right=True)] * 6, rows, header)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _times(report: CompileReport) -> list[list[str]]:
    times = report.roofline
    assert times is not None
    named = (
        ("compute", times.compute_s, "arithmetic, with what is computed again"),
        ("memory", times.hbm_s, "state, weights at use and temporaries, once each way"),
        ("links", times.link_s, "collectives inside a host or slice"),
        ("network", times.network_s, "collectives between them"),
        ("step", times.step_s, f"all overlapped: MFU {100 * times.mfu:.1f} %"),
        ("step", times.serial_s, f"nothing overlapped: MFU {100 * times.serial_mfu:.1f} %"),
    )
    rows = [[label, seconds(value), remark] for label, value, remark in named]
    tokens = f"{report.tokens_per_s:,.0f}"
    return [*rows, ["tokens/s", tokens, "of all devices, in the least time of a step"]]


def gib(count: float) -> str:
    """Bytes in KiB, MiB or GiB."""
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


def seconds(value: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
