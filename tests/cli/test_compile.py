"""`moejax compile` on simulated devices: what it prints, its JSON, its exit codes, its errors."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys

import jax
import pytest

from moejax.config.load import load_config
from moejax.partitioning import make_mesh
from moejax.planner import aot
from moejax.planner.aot import abstract_arguments, compile_for, one_row_a_device
from moejax.planner.hardware import parse_hardware
from moejax.train.state import build_program
from tests.cli.conftest import SMALL, flags

EIGHT = ("compile", "--config=tiny", "--hardware=cpu:8")


@pytest.fixture(scope="module")
def report():
    """The step of the small model compiled for eight simulated devices."""
    cfg = load_config("tiny", SMALL | {"data.batch_size": 4096})
    return compile_for(cfg, parse_hardware("cpu:8"), num_buffers=1000, with_overlap=True, run=True)


@pytest.fixture
def compiled(report, monkeypatch):
    """`compile_for` that answers with `report`, or what it is set to, and keeps its arguments."""
    asked: dict = {"report": report}

    def answer(cfg, hardware, **options):
        asked.update(cfg=cfg, hardware=hardware, **options)
        return asked["report"]

    monkeypatch.setattr(aot, "compile_for", answer)
    return asked


def test_arguments_are_the_shards_of_state_and_batch(report):
    cfg = one_row_a_device(load_config("tiny", SMALL), 8)
    program = build_program(cfg, make_mesh(cfg.mesh))
    leaves = jax.tree.leaves(abstract_arguments(program))
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
    bytes_a_device = sum(
        math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shards, leaves, strict=True)
    )
    memory = report.memory
    assert memory.arguments == bytes_a_device
    assert memory.aliased > 0.9 * memory.outputs  # the state is donated
    assert memory.peak == memory.arguments + memory.outputs - memory.aliased + memory.temporaries


def test_a_step_has_one_row_a_device_and_gathers_over_fsdp(report):
    assert (report.devices, report.rows, report.mesh["fsdp"]) == (8, 8, 8)
    gathers = [row for row in report.collectives if row.kind == "all-gather"]
    assert gathers and all((row.axes, row.group) == ("fsdp", 8) for row in gathers)
    # The sharded weights are gathered at least once, in float32; a few small ones are summed.
    cfg = one_row_a_device(load_config("tiny", SMALL), 8)
    program = build_program(cfg, make_mesh(cfg.mesh))
    sharded = sum(
        math.prod(where.shard_shape(leaf.shape)) * 4
        for leaf, where in zip(
            jax.tree.leaves(program.abstract.params), jax.tree.leaves(program.shardings.params),
            strict=True,
        )
        if any(where.spec)
    )  # fmt: skip
    assert sum(row.operand_bytes for row in gathers) > 0.9 * sharded


def test_the_report_says_everything_and_fits_last(moejax, compiled):
    shown = moejax(*EIGHT, *flags())
    assert shown.code == 0 and not shown.err
    lines = shown.out.splitlines()
    assert lines[0].endswith("8 x simulated device (fsdp=8, simulated on one host)")
    assert lines[-1].startswith("fits: yes (") and lines[-1].endswith(" a device)")
    for part in (
        "compile", "of host memory", "arguments", "temporaries", "peak", "FLOPs a token",
        "all-gather", "fsdp", "compute", "network", "MFU", "temporaries of the fullest moment",
        "inside", "between", "sent beside compute: ", "none are sent in loops over layers",
        "exposed",
    ):  # fmt: skip
        assert part in shown.out


def test_a_batch_on_the_command_line_is_kept_and_another_is_not(moejax, compiled):
    without = [flag for flag in flags() if "batch_size" not in flag]
    assert moejax(*EIGHT, *without).code == 0 and compiled["keep_batch"] is False
    assert moejax(*EIGHT, *without, "--config.data.batch_size=16").code == 0
    assert compiled["keep_batch"] is True and compiled["cfg"].data.batch_size == 16


def test_temporaries_of_the_peak_are_named_and_within_the_total(moejax, compiled, report):
    sizes = [buffer.size for buffer in report.buffers]
    assert sizes == sorted(sizes, reverse=True)
    assert 0.5 * report.memory.temporaries < sum(sizes) <= report.memory.temporaries
    assert all(buffer.source for buffer in report.buffers[:5])
    assert moejax(*EIGHT, *flags(), "--buffers=7").code == 0 and compiled["num_buffers"] == 7


def test_overlap_counts_what_the_collectives_count(moejax, compiled, report):
    """The same bytes, sorted otherwise; a CPU's collectives are not asynchronous."""
    assert moejax(*EIGHT, *flags(), "--overlap").code == 0 and compiled["with_overlap"] is True
    sent = sum(row.sent_bytes for row in report.collectives if not row.open_loop)
    assert sum(row.sent_bytes for row in report.overlap) == sent
    assert all(row.hidden_bytes == row.async_bytes == 0 for row in report.overlap)


def test_nothing_in_loops_is_no_hundred_percent(moejax, compiled, report):
    once = tuple(dataclasses.replace(row, in_loop=False) for row in report.overlap)
    compiled["report"] = dataclasses.replace(report, overlap=once)
    (line,) = [x for x in moejax(*EIGHT, *flags()).out.splitlines() if "beside compute" in x]
    assert (
        "0 % of the bytes, none are sent in loops over layers; of" in line and "100 %" not in line
    )
    compiled["report"] = dataclasses.replace(
        report, overlap=(dataclasses.replace(once[0], in_loop=True), *once[1:])
    )
    assert "0 % in the loops over layers" in moejax(*EIGHT, *flags()).out


def test_what_ran_is_what_was_compiled(moejax, compiled, report):
    """Arguments and collectives exactly; memory in between as near as a process shows it."""
    arguments, working, *collectives = report.measured
    assert (arguments.what, working.what) == ("arguments", "working memory")
    assert arguments.measured == arguments.compiled == report.memory.arguments
    assert 0.3 < working.measured / working.compiled < 3
    sent = {f"{row.kind} over {row.axes}": row for row in report.collectives}
    assert collectives and len(collectives) == len(sent)
    for row in collectives:
        assert row.measured == row.compiled == sent[row.what].sent_bytes
        assert row.measured_runs == row.compiled_runs == sent[row.what].count
    shown = moejax(*EIGHT, *flags(), "--run")
    assert compiled["run"] is True and "run for real" in shown.out


def test_what_is_not_here_does_not_run(moejax):
    shown = moejax("compile", "--config=tiny", "--hardware=h200:1x8", "--run")
    assert shown.code == 2 and shown.err.count("\n") == 1 and "Only simulated ones run" in shown.err


@pytest.mark.slow
def test_a_lora_step_with_experts_runs_as_compiled():
    """The headline's program, shrunk: experts over 4 devices, the rest over 2 such groups."""
    lora = {"lora.rank": "8", "lora.targets": "('q_proj', 'k_proj', 'gate')"}
    cfg = load_config("tiny", lora | {"train.frozen_dtype": "bfloat16"})
    report = compile_for(cfg, parse_hardware("cpu:8"), run=True)
    arguments, working, *collectives = report.measured
    assert arguments.measured == arguments.compiled
    assert 0.7 < working.measured / working.compiled < 1.4
    assert {row.what.partition(" ")[0] for row in collectives} >= {"all-to-all", "all-gather"}
    for row in collectives:
        assert row.measured == (row.measured_runs > 0) * row.compiled
        assert row.open_loop or row.measured_runs == row.compiled_runs


def test_json_holds_every_figure(moejax, compiled, report):
    shown = moejax(*EIGHT, *flags(), "--json")
    read = json.loads(shown.out)
    assert shown.code == 0 and read["fits"] is True and read["hardware"] == "cpu:8"
    assert read["memory"] == dataclasses.asdict(report.memory)
    assert read["measured"][0] == dataclasses.asdict(report.measured[0])
    assert read["categories"][0] == report.categories[0]._asdict()
    assert read["roofline"]["bound"] == report.roofline.bound
    assert {"kind", "axes", "count", "sent_bytes", "link_bytes", "network_bytes"} <= read[
        "collectives"
    ][0].keys()


@pytest.mark.parametrize("refused", ["", "RESOURCE_EXHAUSTED: Used 99.5G of 95.0G hbm."])
def test_what_does_not_fit_is_exit_code_3(moejax, compiled, report, refused):
    small = dataclasses.replace(report.memory, available=report.memory.peak - 1)
    gone = {"refused": refused, "collectives": (), "roofline": None} if refused else {}
    compiled["report"] = dataclasses.replace(report, memory=small, **gone)
    shown = moejax(*EIGHT, *flags())
    assert shown.code == 3 and not shown.err
    assert "fits: no (" in shown.out and ("the compiler: " + refused in shown.out) == bool(refused)
    assert moejax(*EIGHT, *flags(), "--json").code == 3


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "--hardware is needed"),
        (("--hardware=a100:1x8",), "known are h100, h200"),
        (("--hardware=h200:8",), "as in h200:16x8"),
        (("--hardware=v5p:2x2x1*0",), "integer of at least 1, as in v5p:2x2x1*2"),
        (("--hardware=cpu:8", "--overlap=x"), "--overlap takes no value, 'x' was given"),
        (("--hardware=cpu:8", "--config.mesh.fsdp=3"), "does not fit 8 devices"),
        (("--hardware=cpu:8", "--config.mesh.fsdp=-1", "--config.mesh.expert=16"), "does not fit"),
    ],
)
def test_errors_are_one_line(moejax, argv, says):
    shown = moejax("compile", "--config=tiny", *argv)
    assert shown.code == 2 and not shown.out
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and says in shown.err


@pytest.mark.parametrize("hardware", ["h200:1x8", "v5p:2x2x1"])
def test_a_missing_compiler_says_how_to_install_it(moejax, monkeypatch, hardware):
    """Whether or not the extra is installed here."""

    def missing(*_, **__):
        raise NotImplementedError("topology not implemented")

    for module in ("libtpu", "jax_plugins.xla_cuda13"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    monkeypatch.setattr(aot.topologies, "get_topology_desc", missing)
    shown = moejax("compile", "--config=tiny", f"--hardware={hardware}")
    assert shown.code == 2 and "pip install 'moejax[aot]'" in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 101.50G of 95.74G hbm.",
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (101.50G) exceeds available HBM (95.74G).",
    ],
)
def test_the_compilers_own_figure_is_read_where_it_refuses(words):
    memory = aot._memory(None, words, parse_hardware("v5p:2x2x1"))
    assert memory.peak == int(101.5 * 2**30) and not memory.fits
    assert not aot._memory(None, "RESOURCE_EXHAUSTED: no figure", parse_hardware("v5p:2x2x1")).fits


def test_the_compilers_own_log_is_quiet_unless_asked_for(moejax, compiled, monkeypatch):
    """The variable is read once, when JAX starts."""
    name = "TF_CPP_MIN_LOG_LEVEL"
    monkeypatch.setenv(name, "0")
    assert moejax(*EIGHT).code == 0 and os.environ[name] == "0"
    monkeypatch.delenv(name)
    assert moejax(*EIGHT).code == 0 and os.environ[name] == "3"
    script = (
        "import os, sys; from moejax.cli import compile; import moejax.cli.flags as flags; "
        "compile.start_devices = lambda _: sys.exit('jax' in sys.modules); "
        "compile.main(['--config=tiny', '--hardware=cpu:8'])"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0, "JAX came first"
