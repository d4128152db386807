"""What a step costs on some hardware, by arithmetic: seconds to tell, nothing compiled.

Everything here is read off the run's own parameters, shardings and exchange; only temporaries are
missing, which a compiler alone can tell (`moejax.planner.aot`).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from moejax.config import MESH_AXES, ConfigError, MeshConfig, RunConfig
from moejax.models.parts import flat_infos, num_values
from moejax.observability.peak import peak_flops, sheet_flops
from moejax.partitioning.mesh import dcn_choices, near_places
from moejax.planner.aot import abstract_arguments, one_row_a_device
from moejax.planner.categories import Category, argument_categories
from moejax.planner.collectives import Collective
from moejax.planner.flops import Flops, flops_of
from moejax.planner.hardware import Hardware, num_devices
from moejax.planner.roofline import Near, Roofline, hbm_bytes, roofline
from moejax.planner.wire import exchange_traffic, tokens_of_device, weight_traffic
from moejax.train.state import Program, build_program

# Arguments that a step does not write: the rest is read and written.
_ONLY_READ = ("frozen", "batch")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step on one hardware.

    Attributes:
      hardware, device, devices: as it was asked for, kind of its devices, how many.
      mesh: axis -> size.
      scaled: the config's mesh did not fit the devices, so experts are spread over as many as do.
      near: axis -> neighbours along it in one host or slice.
      rows, seq_len: sequences of a step and their length.
      parameters, trained: numbers of the model, and of them those that are trained.
      categories: bytes of a device by what they are.
      available: memory of a device.
      flops: of a token.
      exchange: what a device sends to experts and back in a step.
      weights: what it sends to gather weights and to sum gradients.
      roofline: least time of a step.
    """

    hardware: str
    device: str
    devices: int
    mesh: dict[str, int]
    scaled: bool
    near: dict[str, int]
    rows: int
    seq_len: int
    parameters: int
    trained: int
    categories: tuple[Category, ...]
    available: int
    flops: Flops
    exchange: tuple[Collective, ...]
    weights: tuple[Collective, ...]
    roofline: Roofline

    @property
    def arguments(self) -> int:
        """Bytes of state and batch on a device."""
        return sum(one.device_bytes for one in self.categories)

    @property
    def tokens_per_s(self) -> float:
        """Of all devices, in the least time of a step."""
        return self.rows * self.seq_len / self.roofline.step_s

    @property
    def exchange_per_token(self) -> float:
        """Bytes that one token's rows put on the wire in a step, all layers, both passes."""
        tokens = self.rows * self.seq_len / self.devices
        return sum(row.sent_bytes for row in self.exchange) / tokens


def estimate(
    cfg: RunConfig,
    hardware: Hardware,
    *,
    mesh: dict[str, int] | None = None,
    keep_batch: bool = False,
) -> Estimate:
    """What a step of a config costs on hardware that need not be here.

    Args:
      cfg: the whole config.
      hardware: see :func:`moejax.planner.hardware.parse_hardware`.
      mesh: axes of the mesh that differ on this hardware, by name (`expert`, `dcn.fsdp`).
      keep_batch: use `data.batch_size` instead of one row a device and microbatch.
    Raises:
      ConfigError: no mesh fits the devices, or the batch does not.
    """
    devices = num_devices(hardware)
    laid, scaled = fitting_mesh(cfg, devices, mesh or {})
    cfg = cfg.replace(mesh=laid)
    if not keep_batch:
        cfg = one_row_a_device(cfg, devices)
    sizes = cfg.check(devices)
    near = near_on(hardware, laid, sizes)
    shape = tuple(sizes[axis] for axis in MESH_AXES)
    abstract = AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))
    program = build_program(cfg, abstract)  # type: ignore[arg-type]
    categories = tuple(argument_categories(program, abstract_arguments(program)[1]))
    exchange = exchange_traffic(program, near, hardware.chip.platform)
    weights = weight_traffic(program, near)
    flops = flops_of(program)
    total, trained = _counts(program)
    return Estimate(
        hardware=hardware.name,
        device=hardware.chip.kind,
        devices=devices,
        mesh=sizes,
        scaled=scaled,
        near=dict(near),
        rows=cfg.data.batch_size,
        seq_len=cfg.data.seq_len,
        parameters=total,
        trained=trained,
        categories=categories,
        available=hardware.chip.memory_bytes,
        flops=flops,
        exchange=tuple(exchange),
        weights=tuple(weights),
        roofline=_bound(program, hardware, flops, categories, [*exchange, *weights]),
    )


def fitting_mesh(
    cfg: RunConfig, devices: int, changes: dict[str, int]
) -> tuple[MeshConfig, bool]:  # fmt: skip
    """The config's mesh with `changes`, or where it does not fit the devices one that does.

    `expert` becomes the largest divisor of the devices that also divides the experts and is not
    above the config's; `fsdp` takes the rest, every other axis 1. Only a mesh without changes is
    replaced so.

    Returns:
      The mesh, and whether it was replaced.
    Raises:
      ConfigError: an unknown axis, or a mesh with changes that does not fit.
    """
    laid = _changed(cfg.mesh, changes)
    try:
        laid.sizes(devices)
        return laid, False
    except ConfigError:
        if changes:
            raise
    asked, experts = cfg.mesh.expert, cfg.model.moe.num_experts
    most = devices if asked == -1 else min(asked, devices)
    ways = max(n for n in range(1, most + 1) if devices % n == 0 and experts % n == 0)
    return MeshConfig(expert=ways, fsdp=devices // ways), True


def _changed(mesh: MeshConfig, changes: dict[str, int]) -> MeshConfig:
    for name, size in changes.items():
        group, _, axis = name.rpartition(".")
        if axis not in MESH_AXES or group not in ("", "dcn"):
            raise ConfigError(
                f"{name!r} is no axis of a mesh; known are {', '.join(MESH_AXES)}, and dcn.AXIS "
                "for its part between hosts or slices."
            )
        change = {axis: size}
        mesh = mesh.replace(dcn=mesh.dcn.replace(**change)) if group else mesh.replace(**change)
    return mesh


def near_on(hardware: Hardware, mesh: MeshConfig, sizes: dict[str, int]) -> Near:
    """Along each axis, how many devices share a host (GPUs) or a slice (TPUs).

    As :func:`moejax.partitioning.make_mesh` would lay them: last axes change fastest, and what
    `mesh.dcn` says crosses hosts or slices.

    Raises:
      ConfigError: `mesh.dcn` names another number of hosts or slices than there are.
    """
    across = {axis: getattr(mesh.dcn, axis) for axis in MESH_AXES}
    asked, on_gpu = math.prod(across.values()), hardware.chip.platform == "cuda"
    places = hardware.shape[0] if on_gpu else hardware.slices
    if hardware.chip.platform != "cpu" and asked != places and (asked > 1 or not on_gpu):
        fitting = "; or ".join(dcn_choices(sizes, places)) if places > 1 else "every mesh.dcn at 1"
        raise ConfigError(
            f"--hardware={hardware.name} has {places} {'hosts' if on_gpu else 'slices'}, mesh.dcn "
            f"asks for {asked}. What fits: {fitting or 'another mesh'}."
        )
    if asked == 1 and on_gpu:
        number = np.arange(num_devices(hardware)) // hardware.shape[1]
        return near_places(number.reshape([sizes[axis] for axis in MESH_AXES]), MESH_AXES)
    return {axis: sizes[axis] // across[axis] for axis in MESH_AXES}


def _counts(program: Program) -> tuple[int, int]:
    """Parameters of the model, balancing biases aside, and those that are trained."""
    leaves = zip(
        flat_infos(program.parts.infos), jax.tree.leaves(program.abstract.params),
        jax.tree.leaves(program.trains), strict=True,
    )  # fmt: skip
    counts = [(num_values(info, leaf), trained) for info, leaf, trained in leaves]
    return sum(n for n, _ in counts), sum(n for n, trained in counts if trained)


def _bound(
    program: Program, hardware: Hardware, flops: Flops, categories: tuple[Category, ...],
    collectives: list[Collective],
) -> Roofline:  # fmt: skip
    train = program.cfg.train
    tokens = tokens_of_device(program) * train.accumulation
    read = sum(one.device_bytes for one in categories)
    written = sum(one.device_bytes for one in categories if not one.name.startswith(_ONLY_READ))
    return roofline(
        model_flops=flops.model * tokens,
        hardware_flops=flops.carried_out * tokens,
        hbm_bytes=hbm_bytes(
            program.parts, train.compute_dtype, program.mesh.shape["expert"], train.remat,
            train.accumulation, read + written, 0,
        ),
        collectives=collectives,
        chip=hardware.chip,
        peak_flops=_rate(hardware, train.compute_dtype),
    )  # fmt: skip


def _rate(hardware: Hardware, dtype: str) -> float:
    """FLOP/s of a device: the data sheet's, or this machine's shared by the simulated ones."""
    if hardware.chip.jax_kind:
        return sheet_flops(hardware.chip.jax_kind, jnp.dtype(dtype))
    here = jax.devices()
    return peak_flops(here[0], dtype)[0] * len(here) / num_devices(hardware)
