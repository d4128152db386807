"""What joins a device to its host's memory, by kind of device: one table."""

from __future__ import annotations

import os
from typing import NamedTuple


class HostLink(NamedTuple):
    """A device's way to its host's memory.

    Attributes:
      bytes_s: bytes a second in one direction while every device of the host copies.
      host_bytes: memory of a host.
      devices: of a host.
      source: where the figures are from.
    """

    bytes_s: float
    host_bytes: float
    devices: int
    source: str


_PCIE5 = "PCIe 5.0 x16, 64 GB/s raw a GPU, of which copies reach some 50; NVIDIA DGX data sheet"
_TPU = "host memory: Cloud TPU machine types; the link's rate is assumed, Google prints none"
# By the start of jax's name of a device.
HOST_LINKS: dict[str, HostLink] = {
    "NVIDIA H100": HostLink(50e9, 2e12, 8, _PCIE5),
    "NVIDIA H200": HostLink(50e9, 2e12, 8, _PCIE5),
    "NVIDIA B200": HostLink(50e9, 2e12, 8, _PCIE5),
    "NVIDIA B300": HostLink(50e9, 2e12, 8, _PCIE5),
    # NVLink-C2C carries 450 GB/s each way; the Grace CPU's memory, 500 GB/s, is the narrower.
    "NVIDIA GH200": HostLink(400e9, 480e9, 1, "NVIDIA GH200 data sheet"),
    "NVIDIA GB200": HostLink(200e9, 480e9, 2, "NVIDIA GB200 data sheet: a Grace CPU for two GPUs"),
    "TPU v5": HostLink(25e9, 448e9, 4, _TPU),
    "TPU v6e": HostLink(25e9, 720e9, 4, _TPU),
    "TPU7x": HostLink(25e9, 960e9, 8, _TPU),
}


def host_link(kind: str) -> HostLink:
    """The link of a kind of device, as jax names it; for others a slow one to this machine."""
    starts = [start for start in HOST_LINKS if kind.startswith(start)]
    if starts:
        return HOST_LINKS[max(starts, key=len)]
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return HostLink(10e9, memory, 1, "assumed; simulated devices share one memory")
