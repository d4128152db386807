"""Config section of the device mesh: how many devices lie along each axis."""

from __future__ import annotations

import dataclasses
import math

from moejax.config.fields import ConfigError, Section, setting

MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DcnConfig(Section):
    """How much of each mesh axis crosses hosts or slices (slow network); 1 = none of it."""

    _path = "mesh.dcn."
    stage: int = setting(1, ge=1)
    data: int = setting(1, ge=1)
    fsdp: int = setting(1, ge=1)
    expert: int = setting(1, ge=1)
    context: int = setting(1, ge=1)
    tensor: int = setting(1, ge=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Devices along each mesh axis; at most one axis is -1 and takes what is left."""

    _path = "mesh."
    stage: int = setting(1, ge=-1)
    data: int = setting(1, ge=-1)
    fsdp: int = setting(-1, ge=-1)
    expert: int = setting(1, ge=-1)
    context: int = setting(1, ge=-1)
    tensor: int = setting(1, ge=-1)
    dcn: DcnConfig = dataclasses.field(default_factory=DcnConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        zero = [axis for axis in MESH_AXES if getattr(self, axis) == 0]
        if zero:
            raise ConfigError(
                f"mesh.{zero[0]}=0 is not allowed: it must be >= 1, or -1 for what is left."
            )

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Size of every axis on `num_devices` devices.

        Raises:
          ConfigError: the mesh does not fit.
        """
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        free = [axis for axis, n in sizes.items() if n == -1]
        fixed = math.prod(n for n in sizes.values() if n != -1)
        shown = " x ".join(f"{axis}={n}" for axis, n in sizes.items() if n != 1) or "1"
        if len(free) > 1:
            raise ConfigError(
                f"mesh {shown} leaves {len(free)} axes at -1; at most one may take what is left."
            )
        if num_devices % fixed or (not free and fixed != num_devices):
            leave = "" if free else "leave one axis at -1, or "
            product = f"a divisor of {num_devices}" if free else str(num_devices)
            advice = f"{leave}make the product of the fixed axes {product}"
            if fixed > num_devices:
                advice += f", or simulate more devices on the CPU (--devices={fixed})"
            raise ConfigError(
                f"mesh {shown} does not fit {num_devices} device{'s' * (num_devices != 1)}: "
                f"its fixed axes take {fixed}. {advice[0].upper()}{advice[1:]}."
            )
        sizes |= {axis: num_devices // fixed for axis in free}
        for axis, n in sizes.items():
            across = getattr(self.dcn, axis)
            if n % across:
                fitting = ", ".join(str(k) for k in range(1, n + 1) if n % k == 0)
                raise ConfigError(
                    f"mesh.dcn.{axis}={across} does not divide mesh.{axis}={n}. "
                    f"Use one of {fitting}."
                )
        return sizes
