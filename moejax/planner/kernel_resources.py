"""What the compilers say a kernel takes: registers, on-chip memory, spills, matrix instructions."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

TOOLS = ("ptxas", "cuobjdump", "nvdisasm")


@dataclasses.dataclass(frozen=True)
class Resources:
    """Of one kernel.

    Attributes:
      kernel: its name.
      registers: of a thread (GPU).
      onchip: bytes of shared memory of a block (GPU), of VMEM (TPU).
      spilled: bytes of spill stores and loads (GPU).
      hgmma, mma: large matrix instructions (HGMMA, UTCMMA) and small ones (HMMA) in machine code.
    """

    kernel: str
    registers: int = 0
    onchip: int = 0
    spilled: int = 0
    hgmma: int = 0
    mma: int = 0


def gpu_kernels(hlo: str, dump: pathlib.Path, sm: str) -> list[Resources]:
    """The Triton kernels of a program that was compiled with `xla_dump_to`.

    Its PTX is assembled again, which tells registers and spills; the machine code is read for
    matrix instructions. Shared memory is asked for at the launch, so the list of launches has it.

    Args:
      hlo: the optimised program.
      dump: the folder.
      sm: what to assemble for, as "sm_90a".
    """
    ours = kernel_names(hlo)
    found: list[Resources] = []
    shared = shared_memory("".join(p.read_text() for p in dump.glob("*thunk_sequence*.txt")))
    for ptx in sorted(dump.glob("*.ptx")):
        entries = re.findall(r"\.entry (\w+)\(", ptx.read_text())
        if not any(_is_ours(entry, ours) for entry in entries):
            continue
        cubin = ptx.with_suffix(".cubin")
        told = _run([tool("ptxas"), f"-arch={sm}", "-v", str(ptx), "-o", str(cubin)])
        for block in re.split(r"Compiling entry function '", told)[1:]:
            kernel = block.partition("'")[0]
            if _is_ours(kernel, ours):
                found.append(_assembled(kernel, block, cubin, shared.get(kernel, 0)))
    return found


def tpu_kernels(hlo: str) -> list[Resources]:
    """The Mosaic kernels of an optimised program, with the VMEM that each was given."""
    found: dict[str, Resources] = {}
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        name = re.search(r"(\w+)\)*/pallas_call", line)
        used = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', line)
        sizes = re.findall(r'"size":"(\d+)"', used.group(1)) if used else []
        kernel = name.group(1) if name else "?"
        size = max(sum(map(int, sizes)), found.get(kernel, Resources(kernel)).onchip)
        found[kernel] = Resources(kernel, onchip=size)
    return list(found.values())


def kernel_names(hlo: str) -> set[str]:
    """Names of the Pallas kernels that a program calls."""
    return set(re.findall(r"(\w+)\)*/pallas_call", hlo))  # transpose(jvp(name)) in a gradient


def shared_memory(launches: str) -> dict[str, int]:
    """Kernel -> bytes of shared memory of a block, from XLA's list of launches."""
    pattern = r"(\w+) grid: \[[^\]]*\] threads: \[[^\]]*\]\s+shared_memory: (\d+) bytes"
    found: dict[str, int] = {}
    for kernel, size in re.findall(pattern, launches):
        found[kernel] = max(found.get(kernel, 0), int(size))
    return found


def _is_ours(entry: str, ours: set[str]) -> bool:
    """XLA numbers the kernels of one name: dot, dot_1."""
    return entry in ours or re.sub(r"_+\d+$", "", entry) in ours


def _assembled(kernel: str, told: str, cubin: pathlib.Path, dynamic: int) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, told)
        return int(found.group(1)) if found else 0

    code = _run([tool("cuobjdump"), "-sass", "-fun", kernel, str(cubin)])
    return Resources(
        kernel, registers=number(r"Used (\d+) registers"),
        onchip=number(r"(\d+) bytes smem") + dynamic,
        spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        hgmma=len(re.findall(r"\b(?:HGMMA|UTCHMMA|UTCQMMA)\b", code)),
        mma=len(re.findall(r"\bHMMA\b", code)),
    )  # fmt: skip


@functools.cache
def tool(name: str) -> str:
    """Path of a program of the CUDA toolkit, from the path or from NVIDIA's wheels; "" if none."""
    found = shutil.which(name)
    if found:
        return found
    for folder in sys.path:
        for path in pathlib.Path(folder, "nvidia").glob(f"*/bin/{name}"):
            return str(path)
    return ""


def _run(command: list[str]) -> str:
    near = str(pathlib.Path(command[0]).parent)  # a disassembler calls another beside it
    env = os.environ | {"PATH": f"{os.environ.get('PATH', '')}:{near}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return done.stdout + done.stderr
