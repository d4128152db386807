"""The kernel gate: what it reads from compilers' outputs, what it faults, what it prints."""

from __future__ import annotations

import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from moejax.config import ConfigError
from moejax.planner import kernel_gate
from moejax.planner.gate_children import rows_of
from moejax.planner.gate_table import Row, markdown
from moejax.planner.kernel_resources import (
    Resources,
    gpu_kernels,
    kernel_names,
    shared_memory,
    tpu_kernels,
)
from pallas_kernels import _gpu
from pallas_kernels.gate_case import GateCase

LAUNCHES = """\
001: kCustomKernel [source | next=002 (1)] loop_fusion grid: [1, 1, 1] threads: [15, 1, 1]  \
shared_memory: 0 bytes
  002: kCustomKernel [prev=001 (1)] scan_1 grid: [16, 24, 33] threads: [256, 1, 1]  \
shared_memory: 196608 bytes
  003: kCustomKernel [prev=002 (1)] scan_1 grid: [1, 1, 1] threads: [32, 1, 1]  \
shared_memory: 64 bytes
"""
TPU_HLO = """
%a = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", metadata={op_name=\
"jit(f)/transpose(jvp(mix_grad))/pallas_call"}, backend_config={"scoped_memory_configs":[],\
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"},\
{"memory_space":"1","offset":"0","size":"1024"}],"retry_config":{}}
%b = f32[8] fusion(%a), backend_config={"used_scoped_memory_configs":[{"size":"9"}]}
"""


def test_shared_memory_is_that_of_the_launch():
    assert shared_memory(LAUNCHES) == {"loop_fusion": 0, "scan_1": 196608}


def test_kernels_of_a_tpu_and_their_memory():
    assert tpu_kernels(TPU_HLO) == [Resources("mix_grad", onchip=5120)]
    assert kernel_names(TPU_HLO) == {"mix_grad"}


CASE = GateCase("toy forward", lambda x: x, (), matrix_bound=("dot",))


@pytest.mark.parametrize(
    ("one", "faults"),
    [
        (Resources("dot", hgmma=4), ()),
        (Resources("dot_1", mma=4), ("no large matrix instruction",)),
        (
            Resources("dot", mma=4, spilled=8),
            ("spills registers", "no large matrix instruction"),
        ),
        (Resources("copy", mma=0), ()),
    ],
)
def test_what_fails_a_gpu_kernel(one, faults):
    assert kernel_gate._faults(one, CASE, "gpu") == faults


def test_a_kernel_that_is_not_there_is_a_fault():
    absent = kernel_gate._absent
    assert list(absent([Resources("dot_2")], CASE, "gpu")) == []
    assert list(absent([Resources("copy")], CASE, "gpu")) == ["no kernel dot in the program"]
    assert list(absent([Resources("copy")], CASE, "tpu")) == []
    for platform in ("gpu", "tpu"):
        assert list(absent([], CASE, platform)) == ["no Pallas kernel in the program"]


def _rows(chip, ops=(), quick=False, start=None):
    """h200 passes, every other chip spills."""
    one = Resources("dot", registers=90, onchip=4096, spilled=0 if chip == "h200" else 8, hgmma=3)
    faults = () if chip == "h200" else ("spills | registers",)
    yield Row(chip, "toy forward", one, temporaries=2_000_000, seconds=1.5, faults=faults)


def test_only_required_chips_fail_the_gate(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernel_gate, "gate", _rows)
    monkeypatch.setattr(kernel_gate, "rows_of", lambda command, chip: _rows(chip))
    page = tmp_path / "GATES.md"
    arguments = ["--chips=h200", "--also=b200,v6e", f"--markdown={page}"]
    assert kernel_gate.main(arguments) == 0
    assert "spills | registers" in capsys.readouterr().out
    lines = page.read_text().splitlines()
    assert "| toy forward | `dot` | 90 | 4096 | 0 | 3 | 0 | 2.0 | 1.5 | ok |" in lines
    assert "| toy forward | `dot` | 4096 | 2.0 | 1.5 | spills   registers |" in lines
    assert "## h200: 1 programs, all pass (must pass)" in lines
    assert "## b200: 1 programs, 1 faults (reported)" in lines

    assert kernel_gate.main(["--chips=h200,b200"]) == 1
    assert capsys.readouterr().err == "fault: b200 toy forward dot: spills | registers\n"
    assert kernel_gate.main(["--chips=h200", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["chip"], row["of"]["registers"], row["faults"]) == ("h200", 90, [])


def test_a_page_names_versions_and_time():
    page = markdown([], ["h200"], [], 90.0, ["--chips=h200"])
    assert f"1.5 minutes, jax {jax.__version__}" in page
    assert "python -m moejax.planner.kernel_gate --chips=h200\n" in page


def test_without_the_compilers_it_is_one_line(monkeypatch, capsys):
    def missing(hardware):
        raise ConfigError("needs XLA's compiler, pip install 'moejax[aot]'")

    monkeypatch.setattr(kernel_gate, "absent_devices", missing)
    assert kernel_gate.main(["--chips=h200"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "moejax[aot]" in err

    monkeypatch.setattr(kernel_gate, "absent_devices", lambda hardware: [None])
    monkeypatch.setattr(kernel_gate, "tool", lambda name: "" if name == "cuobjdump" else name)
    assert kernel_gate.main(["--chips=h200"]) == 2
    assert "cuobjdump of the CUDA toolkit: not found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--chips=a100"], "'a100' has no gate"), (["--ops=kdb"], "no operator 'kdb'")],
)
def test_bad_names_are_one_line(arguments, message, capsys):
    assert kernel_gate.main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def _product(size, warps, name="dot"):
    """A case whose one program multiplies two square tiles."""

    def body(a, b, out):
        out[...] = _gpu.dot(a[...], b[...])

    def fn(a, b):
        spec = pl.BlockSpec((size, size), lambda i: (0, 0))
        return _gpu.call(
            body, name=name, grid=(1,), in_specs=[spec, spec], out_specs=spec, warps=warps,
            out_shape=jax.ShapeDtypeStruct((size, size), jnp.float32),
        )(a, b)  # fmt: skip

    args = (jax.ShapeDtypeStruct((size, size), jnp.bfloat16),) * 2
    return GateCase(f"product of {size}", fn, args, matrix_bound=("dot",), quick=True)


@pytest.mark.aot
def test_products_compiled_for_an_h200(monkeypatch):
    """One is right, the others ask too much of shared memory and registers, or are too small."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    from pallas_kernels.gated_norm import specs

    def cases(platform):
        return [
            _product(128, 4), _product(256, 4), _product(128, 1), _product(16, 4),
            _product(64, 4, "other"),
        ]  # fmt: skip

    monkeypatch.setattr(specs, "gate_cases", cases, raising=False)
    good, large, spilled, small, other, absent = kernel_gate.gate("h200", ["gated_norm"])
    assert good.of.hgmma > 0 and 0 < good.of.registers < 256 and not good.faults
    assert good.of.onchip >= 2 * 128 * 128 * 2  # both factors
    assert not large.of.kernel and "Shared memory size limit exceeded" in large.fault
    assert spilled.of.spilled > 0
    assert spilled.faults == ("spills registers", "no large matrix instruction")
    assert small.of.mma > 0 and small.faults == ("no large matrix instruction",)
    assert other.of.kernel == "other" and absent.faults == ("no kernel dot in the program",)


@pytest.mark.aot
def test_a_tpu_tells_memory_and_refuses_blocks_that_do_not_fit():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    rows = list(kernel_gate.gate("v5p", ["attn_res"]))
    assert rows and all(row.of.onchip > 0 and not row.faults for row in rows)


def test_no_ptx_no_kernels(tmp_path):
    assert gpu_kernels("", tmp_path, "sm_90a") == []


@pytest.mark.parametrize("ops", ["", "permute"])
def test_a_gate_without_a_case_does_not_pass(ops, monkeypatch, capsys):
    monkeypatch.setattr(kernel_gate, "absent_devices", lambda hardware: [None])
    assert kernel_gate.main([f"--ops={ops}", "--chips=v5p"]) == 2
    error = capsys.readouterr().err.strip()
    assert error == f"error: nothing to compile: --ops={ops} has no case for --chips=v5p."


CHILD = """
import json, os, signal, sys
start = int(sys.argv[-1].partition("=")[2])
for index in range(start, 4):
    print(json.dumps({"begins": index, "case": f"case {index}"}), flush=True)
    row = {"chip": "b200", "case": f"case {index}", "of": {"kernel": "k"}, "faults": []}
    crashes = index == 1 or index == 2 and not os.path.exists(sys.argv[1])
    if crashes:
        open(sys.argv[1], "a").close() if index == 2 else None
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps(row), flush=True)
"""


def test_a_compiler_that_dies_takes_one_program_with_it(tmp_path):
    """Of case 1 it dies each time, of case 2 once: a race, which the second try may win."""
    command = [sys.executable, "-c", CHILD, str(tmp_path / "died")]
    rows = list(rows_of(command, "b200"))
    assert [row.case for row in rows] == [f"case {i}" for i in range(4)]
    assert [bool(row.faults) for row in rows] == [False, True, False, False]
    assert rows[1].fault == "the compiler died 2 times, of SIGSEGV"


def test_what_a_child_refuses_is_said(capsys):
    child = "import sys; print('error: nothing here', file=sys.stderr); sys.exit(2)"
    with pytest.raises(ConfigError, match=r"^nothing here$"):
        list(rows_of([sys.executable, "-c", child], "b200"))


def test_a_child_begins_where_it_is_told(monkeypatch, capsys):
    from pallas_kernels.gated_norm import specs

    monkeypatch.setattr(kernel_gate, "absent_devices", lambda hardware: [None])
    monkeypatch.setattr(specs, "gate_cases", lambda platform: [_product(16, 4), _product(32, 4)])
    monkeypatch.setattr(
        kernel_gate, "_compiled", lambda *a: iter([Row("v5p", a[3].name, Resources("dot"))])
    )
    assert kernel_gate.main(["--chips=v5p", "--ops=gated_norm", "--json", "--start=1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"begins": 1, "case": "product of 32"}
    assert [line["case"] for line in lines] == ["product of 32"] * 2
