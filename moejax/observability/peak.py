"""What the hardware could do at best, for the share of it that is used (MFU), and peak memory."""

from __future__ import annotations

import functools
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

# Dense bfloat16 FLOP/s of one jax device, by the start of its device_kind, longest start first.
# NVIDIA prints figures with 2:4 sparsity; they are halved here.
_BF16_PEAKS = {
    # NVIDIA A100, A10, L4, L40, L40S data sheets.
    "NVIDIA A100": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    # NVIDIA H100 and H200 data sheets: the SXM boards, then the slower PCIe and NVL ones.
    "NVIDIA H100": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200": 989.4e12,
    # NVIDIA HGX B200 and GB200 NVL72: sparse, 36 PFLOP/s over 8 GPUs and 360 over 72.
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300": 2250e12,
    "NVIDIA GB300": 2500e12,
    # Cloud TPU documentation, per chip. A v2, v3 or 7x chip is two jax devices.
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
}
_MEASURE_S = 0.2


def peak_flops(device: jax.Device, dtype: Any = jnp.bfloat16) -> tuple[float, str]:
    """Best matrix-product rate of one device.

    float32 runs as TF32 on NVIDIA tensor cores, at half the bfloat16 rate, and as bfloat16 passes
    on TPUs. Simulated CPU devices share the host, so each gets its part of what the host does.

    Args:
      device: a jax device.
      dtype: what the products are computed in, 2 or 4 bytes wide.
    Returns:
      FLOP/s, and where the number is from: "data sheet" or "measured".
    """
    known = sheet_flops(device.device_kind, dtype)
    return (known, "data sheet") if known else (_measured(device, jnp.dtype(dtype)), "measured")


def sheet_flops(kind: str, dtype: Any = jnp.bfloat16) -> float:
    """The data sheet's rate of a kind of device, as jax names it; 0 for one that is not listed."""
    starts = [start for start in _BF16_PEAKS if kind.startswith(start)]
    if not starts:
        return 0.0
    peak = _BF16_PEAKS[max(starts, key=len)]
    half = kind.startswith("NVIDIA") and jnp.dtype(dtype).itemsize == 4
    return peak / 2 if half else peak


@functools.cache
def _measured(device: jax.Device, dtype: jnp.dtype) -> float:
    """Rate of the fastest of some 0.2 s of square products, once a process."""
    on_cpu = device.platform == "cpu"
    # CPUs have no bfloat16 units to speak of: what they reach in float32 is their peak.
    size, dtype = (1024, jnp.dtype(jnp.float32)) if on_cpu else (8192, dtype)
    a = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    best_s, until = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < until:
        start = time.perf_counter()
        product(a, a).block_until_ready()
        best_s = min(best_s, time.perf_counter() - start)
    sharers = jax.local_device_count(device.platform) if on_cpu else 1
    return 2 * size**3 / best_s / sharers


def peak_memory_bytes() -> int:
    """Most memory in use so far: the fullest local device's, or this process' on a CPU."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
