"""The real train step, compiled for devices that are not here; nothing is allocated."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import topologies

from moejax.config import ConfigError, RunConfig
from moejax.memory.swap_core import Plan
from moejax.models.flops import train_flops_per_token
from moejax.observability.peak import peak_flops
from moejax.partitioning import describe_mesh, make_mesh, near_devices, num_batch_shards
from moejax.planner.buffers import DUMP_OPTIONS, Buffer, peak_buffers
from moejax.planner.categories import Category, argument_categories
from moejax.planner.collectives import Collective, collective_reader, count_collectives
from moejax.planner.flops import flops_of
from moejax.planner.hardware import Hardware, num_chips, target_config
from moejax.planner.host_memory import (
    forget_traces,
    give_back,
    giving_back,
    host_bytes,
    keep_one_arena,
)
from moejax.planner.measure import Measured, run_and_measure
from moejax.planner.overlap import Overlap, read_overlap
from moejax.planner.roofline import Roofline, hbm_bytes, roofline, with_links
from moejax.planner.tower import Tower, tower_of
from moejax.train.batch_shapes import batch_shapes
from moejax.train.compile import Compiled, compile_once, kernel_lines
from moejax.train.memory_plan import (
    budget_of,
    following,
    keeping_nothing,
    plan_memory,
    tokens_a_device,
)
from moejax.train.state import Program, TrainState, abstract_state, build_program
from moejax.train.step import batch_sharding, train_step
from moejax.train.xla_flags import compiler_options
from pallas_kernels.choose import lowering_for

EXTRA = "pip install 'moejax[aot]'"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      arguments: state and batch.
      outputs: the next state and the metrics.
      aliased: outputs that are written over donated arguments.
      temporaries: everything else while the step runs.
      peak: arguments + outputs - aliased + temporaries.
      available: memory of a device.
      host: what the step holds of the host's memory for this device, in the same sense as `peak`.
      program: its instructions, which `peak` does not count.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    available: int
    host: int = 0
    program: int = 0

    @property
    def fits(self) -> bool:
        return self.peak <= self.available


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What compiling a step for some hardware told.

    Attributes:
      hardware: as it was asked for.
      device: kind of a device.
      devices: how many.
      mesh: axis -> size.
      links: the mesh in words: over which links each axis goes.
      rows, seq_len: sequences of a step and their length.
      compile_s: seconds of tracing, lowering and compiling.
      host_bytes: largest resident memory of this process so far.
      memory: bytes a device; where the compiler refused, only the peak it gave.
      collectives: what a device sends; empty where the compiler refused.
      flops_per_token: of the model's maths.
      roofline: None where the compiler refused.
      refused: the compiler's own words when it found that the step does not fit, or "".
      buffers: temporaries alive at the peak, largest first; empty where they were not asked for.
      overlap: what of the collectives is hidden behind compute; empty where it was not asked for.
      categories: what the arguments are.
      measured: what running the step told; empty where it was not run.
      kernels: what runs the operators, and why others do not, in lines.
      tower: what images cost; None where rows have none.
      plan: what train.remat=auto chose; None with another.
      predicted: peak of a device that the plan was expected to have.
      microbatch_tokens: of a device.
    """

    hardware: str
    device: str
    devices: int
    mesh: dict[str, int]
    links: str
    rows: int
    seq_len: int
    compile_s: float
    host_bytes: int
    memory: Memory
    collectives: tuple[Collective, ...]
    flops_per_token: float
    roofline: Roofline | None
    refused: str = ""
    buffers: tuple[Buffer, ...] = ()
    overlap: tuple[Overlap, ...] = ()
    categories: tuple[Category, ...] = ()
    measured: tuple[Measured, ...] = ()
    kernels: tuple[str, ...] = ()
    tower: Tower | None = None
    plan: Plan | None = None
    predicted: int = 0
    microbatch_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all devices in the least time of a step; 0 where none is known."""
        return self.rows * self.seq_len / self.roofline.step_s if self.roofline else 0.0

    @property
    def fits(self) -> bool:
        return not self.refused and self.memory.fits


# libtpu asks no cloud what machine this is and complains about nothing (the type is any one it
# knows), and two such processes may run side by side.
_LIBTPU_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


@contextlib.contextmanager
def _environment_of(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that are not set yet, for a while: whoever asks later where this process runs must
    not find a pod of TPUs."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def absent_devices(hardware: Hardware) -> list[Any]:
    """Devices to compile for: described by XLA's plugin, or this process's simulated ones.

    Raises:
      ConfigError: the plugin is missing, or there is no such machine.
    """
    if hardware.chip.platform == "cpu":
        found = jax.devices("cpu")
        if len(found) < num_chips(hardware):
            raise ConfigError(
                f"--hardware={hardware.name}: JAX runs with {len(found)} simulated devices already."
            )
        return found[: num_chips(hardware)]
    try:
        if hardware.chip.platform == "tpu":
            slices = {"num_slices": hardware.slices} if hardware.slices > 1 else {}
            with _environment_of(_LIBTPU_ALONE):
                described = topologies.get_topology_desc(
                    hardware.topology, platform="tpu", **slices
                )
        else:
            hosts, gpus = hardware.shape
            described = topologies.get_topology_desc(
                hardware.name.partition(":")[0], platform="cuda", topology=f"1x{hosts}x{gpus}",
                target_config=target_config(hardware.chip),
            )  # fmt: skip
    except Exception as error:  # each plugin has its own
        raise ConfigError(_no_topology(hardware, error)) from error
    return list(described.devices)


def _no_topology(hardware: Hardware, error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    module = "libtpu" if hardware.chip.platform == "tpu" else "jax_plugins.xla_cuda13"
    try:
        __import__(module)
    except ImportError:
        return (
            f"--hardware={hardware.name} needs XLA's compiler for {hardware.chip.platform}, "
            f"which is not installed. {EXTRA} brings it (1.4 GB on disk, no driver needed)."
        )
    return f"--hardware={hardware.name} cannot be described: {text}."


def one_row_a_device(cfg: RunConfig, devices: int) -> RunConfig:
    """The config with as many rows a step as batch shards and microbatches."""
    rows = num_batch_shards(cfg.mesh.sizes(devices)) * cfg.train.accumulation
    return cfg.replace(data=cfg.data.replace(batch_size=rows), eval=cfg.eval.replace(batch_size=0))


def compile_for(
    cfg: RunConfig,
    hardware: Hardware,
    *,
    keep_batch: bool = False,
    num_buffers: int = 0,
    with_overlap: bool = False,
    run: bool = False,
) -> CompileReport:
    """Compiles the train step of a config for hardware that need not be here.

    Args:
      cfg: the whole config; its mesh is laid over the hardware's devices.
      hardware: see :func:`parse_hardware`.
      keep_batch: use `data.batch_size` instead of one row a device and microbatch.
      num_buffers: also report so many of the temporaries alive at the peak.
      with_overlap: also report which collectives have compute beside them.
      run: also run the step, of simulated devices, and measure it.
    Raises:
      ConfigError: the mesh or batch does not fit the devices, a compiler is missing, or a step is
        to run on what is not here.
    """
    if run and hardware.chip.platform != "cpu":
        raise ConfigError(
            f"--run with --hardware={hardware.name}: those devices are not here. "
            "Only simulated ones run, as cpu:8."
        )
    if run and sys.platform != "linux":
        raise ConfigError("--run reads memory from /proc, which only Linux has: leave it out.")
    keep_one_arena()
    devices = absent_devices(hardware)
    if not keep_batch:
        cfg = one_row_a_device(cfg, len(devices))
    cfg.check(len(devices))
    plan, predicted = None, 0
    if cfg.train.remat == "auto":
        cfg, plan, predicted = _planned(cfg, hardware, devices)
    program = build_program(cfg, make_mesh(cfg.mesh, devices))
    with tempfile.TemporaryDirectory(prefix="moejax-compile-") as scratch:
        dump = pathlib.Path(scratch) if num_buffers else None
        compiled, refused, seconds = _compile(program, hardware, dump)
        buffers = peak_buffers(dump)[:num_buffers] if dump else []
    memory = _memory(compiled, refused, hardware)
    patches = cfg.data.image_patches
    flops = train_flops_per_token(program.parts, cfg.data.seq_len, program.trains, patches)
    collectives: tuple[Collective, ...] = ()
    overlap: tuple[Overlap, ...] = ()
    bound = None
    if compiled is not None:
        hlo = compiled.call.as_text()
        near = near_devices(program.mesh, cfg.mesh)
        layout = dict(program.mesh.shape), [device.id for device in program.mesh.devices.flat]
        found = count_collectives(hlo, *layout)
        collectives = tuple(with_links(row, near) for row in found)
        bound = _bound(program, hardware, memory, collectives, flops)
        if with_overlap:
            read = collective_reader(*layout)
            peak = peak_flops(program.mesh.devices.flat[0], cfg.train.compute_dtype)[0]
            overlap = tuple(read_overlap(hlo, read, near, hardware.chip, peak))
    return CompileReport(
        hardware=hardware.name,
        device=hardware.chip.kind,
        devices=len(devices),
        mesh=dict(program.mesh.shape),
        links=describe_mesh(program.mesh, cfg.mesh),
        rows=cfg.data.batch_size,
        seq_len=cfg.data.seq_len,
        compile_s=seconds,
        host_bytes=host_bytes(),
        memory=memory,
        collectives=collectives,
        flops_per_token=flops,
        roofline=bound,
        refused=refused,
        buffers=tuple(buffers),
        overlap=overlap,
        categories=tuple(argument_categories(program, abstract_arguments(program)[1])),
        measured=tuple(run_and_measure(program, compiled)) if run and compiled else (),
        kernels=tuple(kernel_lines(compiled.kernels)) if compiled else (),
        tower=tower_of(program),
        plan=plan,
        predicted=predicted,
        microbatch_tokens=tokens_a_device(program),
    )


def _planned(cfg: RunConfig, hardware: Hardware, devices: list[Any]) -> tuple[RunConfig, Plan, int]:
    """The config with names in place of `train.remat=auto`, the plan, and its peak in bytes."""
    mesh = make_mesh(cfg.mesh, devices)
    base = build_program(keeping_nothing(cfg), mesh)
    taken = _memory(*_compile(base, hardware, None)[:2], hardware).peak
    rate = peak_flops(devices[0], cfg.train.compute_dtype)[0]
    kind = hardware.chip.jax_kind or hardware.chip.kind
    budget = budget_of(
        cfg, kind, available=hardware.chip.memory_bytes, taken=taken, flops=rate
    )  # fmt: skip
    platform = {"cuda": "gpu"}.get(hardware.chip.platform, hardware.chip.platform)
    with lowering_for(platform, hardware.name.partition(":")[0]):
        plan = plan_memory(base._replace(cfg=cfg), budget)
    return following(cfg, plan), plan, round(taken + plan.device_bytes)


def abstract_arguments(program: Program) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """State and batch of a step as shapes with shardings."""
    return abstract_state(program), batch_shapes(program.cfg, batch_sharding(program))


def _compile(
    program: Program, hardware: Hardware, dump: pathlib.Path | None
) -> tuple[Compiled | None, str, float]:
    """The compiled step, or the compiler's words where it does not fit; and the seconds."""
    platform = {"cuda": "gpu"}.get(hardware.chip.platform, hardware.chip.platform)
    options = compiler_options(program.cfg.train.prefetch, program.mesh)
    # Of a CPU only buffers and collectives are asked, which good machine code does not change.
    options |= {"xla_backend_optimization_level": 0} if platform == "cpu" else {}
    if dump is not None:
        options |= DUMP_OPTIONS | {"xla_dump_to": str(dump)}
    began = time.perf_counter()
    try:
        chip = hardware.name.partition(":")[0]
        with jax.set_mesh(program.mesh), lowering_for(platform, chip), giving_back():
            compiled = compile_once(
                lambda state, batch: train_step(program, state, batch),
                *abstract_arguments(program),
                donate_argnums=0,
                out_shardings=(program.shardings, None),
                compiler_options=options,
                before_compile=forget_traces,
            )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, " ".join(str(error).split()), time.perf_counter() - began
    give_back()
    return compiled, "", compiled.compile_s


# The TPU compiler's two ways to say how much a step needs in all: arguments are in it, though one
# of them calls it temporaries.
_USED = re.compile(r"(?:[Uu]sed ([\d.]+)([KMGT]?) of|\(([\d.]+)([KMGT]?)\) exceeds available)")


def _memory(compiled: Compiled | None, refused: str, hardware: Hardware) -> Memory:
    available = hardware.chip.memory_bytes
    if compiled is None:
        match = _USED.search(refused)
        units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
        figure, unit = (part for part in match.groups() if part is not None) if match else ("0", "")
        peak = int(float(figure) * units[unit])
        return Memory(0, 0, 0, 0, max(peak, available + 1), available)
    facts = compiled.call.memory_analysis()
    arguments, outputs = facts.argument_size_in_bytes, facts.output_size_in_bytes
    aliased, temporaries = facts.alias_size_in_bytes, facts.temp_size_in_bytes
    host = facts.host_argument_size_in_bytes + facts.host_temp_size_in_bytes
    host += facts.host_output_size_in_bytes - facts.host_alias_size_in_bytes
    if hardware.chip.platform == "tpu":
        # Its temporaries count on-chip memories too (a half more in a layer of Kimi-Linear-48B);
        # its peak is that of the HBM and of what is in host memory.
        held = arguments + outputs - aliased + host
        temporaries = max(facts.peak_memory_in_bytes - held, 0)
    peak = arguments + outputs - aliased + temporaries
    program = facts.generated_code_size_in_bytes
    return Memory(arguments, outputs, aliased, temporaries, peak, available, host, program)


def _bound(
    program: Program, hardware: Hardware, memory: Memory, collectives: tuple[Collective, ...],
    flops_per_token: float,
) -> Roofline:  # fmt: skip
    cfg, mesh = program.cfg, program.mesh
    tokens = cfg.data.batch_size * cfg.data.seq_len / mesh.devices.size
    remat = cfg.train.remat
    return roofline(
        model_flops=flops_per_token * tokens,
        hardware_flops=flops_of(program).carried_out * tokens,
        hbm_bytes=hbm_bytes(
            program.parts, cfg.train.compute_dtype, mesh.shape["expert"], remat,
            cfg.train.accumulation, memory.arguments + memory.outputs, memory.temporaries,
        ),
        collectives=collectives,
        chip=hardware.chip,
        peak_flops=peak_flops(mesh.devices.flat[0], cfg.train.compute_dtype)[0],
    )  # fmt: skip
