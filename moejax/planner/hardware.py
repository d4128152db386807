"""Accelerators by name: their memory and links, and what XLA must know to compile for them."""

from __future__ import annotations

import dataclasses
import math
import os
import re

from moejax.config import ConfigError

_GB, _GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One JAX device of a kind of accelerator.

    Attributes:
      kind: name of a device, as people write it.
      platform: XLA's: cuda, tpu or cpu.
      memory_bytes: memory of a device as sold, in bytes. What XLA may hand out is a little more on
        NVIDIA's cards, and the difference is what the driver and NCCL take.
      hbm_bytes_s: memory bandwidth of a device.
      link_bytes_s: what a device sends inside its host or slice, all links, one direction.
      network_bytes_s: what a device sends to other hosts or slices, one direction.
      source: where the figures are from.
      jax_kind: how jax names the device, for its arithmetic rate; "" where that is measured.
      cores: jax devices of a chip.
      target: fields of XLA's GpuTargetConfigProto that differ between cards; none where XLA knows
        no such card.
    """

    kind: str
    platform: str
    memory_bytes: int
    hbm_bytes_s: float
    link_bytes_s: float
    network_bytes_s: float
    source: str
    jax_kind: str = ""
    cores: int = 1
    target: tuple[tuple[str, int | float | str], ...] = ()


def _nvidia(
    kind: str, memory_gb: int, hbm: float, nvlink: float, source: str, *, network: float = 50e9,
    **target: int | float | str,
) -> Chip:  # fmt: skip
    return Chip(
        kind=kind,
        platform="cuda",
        memory_bytes=memory_gb * _GB,
        hbm_bytes_s=hbm,
        link_bytes_s=nvlink,
        # By default one 400 Gb/s adapter a GPU, as in NVIDIA's own HGX and DGX hosts.
        network_bytes_s=network,
        source=source,
        jax_kind=f"NVIDIA {kind.split()[0]}",
        target=tuple(target.items()),
    )


def _tpu(
    kind: str, jax_kind: str, cores: int, memory_gib: int, hbm: float, ici: float, dcn_gbit: float
) -> Chip:
    """Per device from figures per chip; `ici` counts both directions, as Google prints it."""
    return Chip(
        kind=kind,
        platform="tpu",
        memory_bytes=memory_gib * _GIB // cores,
        hbm_bytes_s=hbm / cores,
        link_bytes_s=ici / 2 / cores,
        network_bytes_s=dcn_gbit * 1e9 / 8 / cores,
        source="Cloud TPU documentation, system architecture tables",
        jax_kind=jax_kind,
        cores=cores,
    )


_SHEET = "NVIDIA data sheet; XLA's target description of the card"
CHIPS: dict[str, Chip] = {
    "h100": _nvidia(
        "H100 SXM 80 GB", 80, 3.35e12, 450e9, _SHEET, core_count=132, clock_rate_ghz=1.98,
        memory_bandwidth=3352320000000, l2_cache_size=52428800, device_memory_size=84942979072,
        major=9, name="NVIDIA H100 80GB HBM3",
    ),
    "h200": _nvidia(
        "H200 SXM", 141, 4.8e12, 450e9, _SHEET, core_count=132, clock_rate_ghz=1.98,
        memory_bandwidth=4800000000000, l2_cache_size=62914560, device_memory_size=150754820096,
        major=9, name="NVIDIA H200",
    ),
    "b200": _nvidia(
        "B200", 192, 7.67e12, 900e9, _SHEET, core_count=148, clock_rate_ghz=1.965,
        memory_bandwidth=7672320000000, l2_cache_size=132644864, device_memory_size=191514411008,
        major=10, name="NVIDIA B200",
    ),
    # XLA has no description of it yet; 800 Gb/s a GPU.
    "b300": _nvidia("B300", 288, 8e12, 900e9, "NVIDIA data sheet", network=100e9),
    "v5p": _tpu("TPU v5p", "TPU v5", 1, 95, 2.765e12, 1200e9, 50),
    "v6e": _tpu("TPU v6e", "TPU v6e", 1, 32, 1.638e12, 800e9, 100),
    # Two JAX devices a chip.
    "tpu7x": _tpu("TPU7x core", "TPU7x", 2, 192, 7.38e12, 1200e9, 100),
}  # fmt: skip

_TARGET_CONFIG = """\
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: {core_count}  fpus_per_core: 128  clock_rate_ghz: {clock_rate_ghz}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth}  l2_cache_size: {l2_cache_size}
  device_memory_size: {device_memory_size}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


def target_config(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto of a card, as text.

    Raises:
      ConfigError: XLA has no description of it.
    """
    if not chip.target:
        raise ConfigError(f"XLA knows no {chip.kind} yet; `moejax cost` needs no compiler.")
    return _TARGET_CONFIG.format(**dict(chip.target))


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A machine to compile for.

    Attributes:
      name: as it was written, `h200:16x8`.
      chip: kind of its devices.
      shape: (hosts, GPUs a host), the TPU topology of a slice, or (devices,) of the CPU.
      slices: TPU slices of that topology, which only the data centre's network joins.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def topology(self) -> str:
        """Name of one host group or slice, as XLA's plugins know it."""
        return self.name.partition("*")[0]


def parse_hardware(text: str) -> Hardware:
    """`h200:16x8` (hosts x GPUs), `v5p:4x4x8` (TPU topology) or `cpu:8` (simulated devices).

    `v5p:4x4x8*2` is two such slices.

    Raises:
      ConfigError: unknown hardware (with the known ones), or a shape that it does not have.
    """
    name, _, shape_text = text.strip().lower().partition(":")
    shape_text, _, slices = shape_text.partition("*")
    if name != "cpu" and name not in CHIPS:
        raise ConfigError(
            f"--hardware={text}: unknown hardware {name!r}; known are "
            f"{', '.join([*CHIPS, 'cpu'])}, as in h200:16x8 (hosts x GPUs), v5p:4x4x8 (topology), "
            "cpu:8 (simulated devices)."
        )
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape_text):
        raise ConfigError(f"--hardware={text}: {_shape_rule(name)}")
    shape = tuple(map(int, shape_text.split("x")))
    chip = _this_cpu(shape[0]) if name == "cpu" else CHIPS[name]
    if len(shape) not in {"cuda": (2,), "cpu": (1,), "tpu": (2, 3)}[chip.platform]:
        raise ConfigError(f"--hardware={text}: {_shape_rule(name)}")
    if "*" in text and chip.platform != "tpu":
        raise ConfigError(
            f"--hardware={text}: only TPUs have slices, as in v5p:4x4x8*2 for two of them."
        )
    if "*" in text and not re.fullmatch(r"[1-9]\d*", slices):
        raise ConfigError(
            f"--hardware={text}: {slices or 'nothing'} after the * is no number of slices; it must "
            f"be an integer of at least 1, as in {name}:{shape_text}*2 for two slices."
        )
    return Hardware(text, chip, shape, int(slices or 1))


def _shape_rule(name: str) -> str:
    if name == "cpu":
        return "give the number of simulated devices, as in cpu:8."
    if CHIPS[name].platform == "cuda":
        return f"give hosts x GPUs a host, as in {name}:16x8."
    example = {"v6e": "v6e:4x4", "tpu7x": "tpu7x:4x4x4"}.get(name, f"{name}:4x4x8")
    return f"give the topology in chips, as in {example}, or {example}*2 for two slices of it."


def _this_cpu(devices: int) -> Chip:
    """Simulated devices share this machine's memory; the speeds are those of a common server."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Chip(
        kind="simulated device",
        platform="cpu",
        memory_bytes=memory // devices,
        hbm_bytes_s=50e9 / devices,
        link_bytes_s=10e9 / devices,
        network_bytes_s=10e9 / devices,
        source="a two-channel DDR4 server; only an order of magnitude",
    )


def num_chips(hardware: Hardware) -> int:
    """Product of the shape: GPUs, TPU chips (which may be two devices each) or CPU devices."""
    return math.prod(hardware.shape) * hardware.slices


def num_devices(hardware: Hardware) -> int:
    """Its jax devices."""
    return num_chips(hardware) * hardware.chip.cores
