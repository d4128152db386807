"""Silent corruption: does what should be the same on several devices differ by a bit?

Two checks, each by a sum of bits that every device makes of what it holds itself:

- parts of the state that several devices hold alike (norms, biases, all that `mesh.data` repeats)
  must have one sum;
- the gradients of one microbatch, computed twice, must have the same sums both times. That needs
  kernels without atomic additions, as those of CPUs and TPUs are.

The sum of a part is `sum_i bits_i (2 i + 1) mod 2^32`. A flipped bit changes it by a power of two
times an odd number, which is never 0.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.checkpoint.layout import named_leaves
from moejax.config import ConfigError
from moejax.train.state import Program, TrainState
from moejax.train.step import gradients
from moejax.train.trainable import split

_SHOWN = 3
Sums = Mapping[str, np.ndarray]  # of each array, uint32 [devices in the mesh's order]


class CorruptionError(ConfigError):
    """Devices that must hold or compute the same bits do not."""


class StateCheck:
    """The checks of one run; all its processes call them together."""

    def __init__(self, program: Program):
        """
        Args:
          program: of the run; `train.check_every` is read.
        """
        self._program, self._every = program, program.cfg.train.check_every
        self._of_state: Callable[..., Any] | None = None
        self._of_gradients: Callable[..., Any] | None = None

    def due(self, step: int) -> bool:
        """Whether the state after this step is to be checked."""
        return self._every > 0 and step % self._every == 0

    def __call__(self, step: int, state: TrainState, batch: dict[str, jax.Array]) -> None:
        """Compares.

        Args:
          step: that the state is of.
          state: on the mesh of the program.
          batch: as the step takes it; its first microbatch is computed twice.
        Raises:
          CorruptionError: a line with the arrays and the devices.
        """
        mesh, leaves = self._program.mesh, _on_devices(state)
        if self._of_state is None:
            specs = {name: _where(leaf).spec for name, leaf in leaves.items()}
            self._of_state = _compiled(mesh, lambda leaves: bit_sums(mesh, leaves, specs))
            self._of_gradients = _compiled(mesh, self._gradient_sums)
        sums = jax.device_get(self._of_state(leaves))
        _tell(step, [unlike_copies(name, leaf, sums[name]) for name, leaf in leaves.items()])
        assert self._of_gradients is not None
        with jax.set_mesh(mesh):
            once, again = (
                jax.device_get(self._of_gradients(state, batch)) for _ in range(2)
            )  # fmt: skip
        _tell(step, unlike_results(mesh, once, again))

    def _gradient_sums(self, state: TrainState, batch: dict[str, jax.Array]) -> dict:
        program = self._program
        first = jax.tree.map(lambda leaf: leaf[:1], batch)
        grads = named_leaves(gradients(program, state, first)[0])
        shardings = named_leaves(split(program.shardings.params, program.trains)[0])
        return bit_sums(program.mesh, grads, {n: s.spec for n, s in shardings.items()})


def bit_sums(
    mesh: Mesh, leaves: Mapping[str, jax.Array], specs: Mapping[str, P]
) -> dict[str, jax.Array]:
    """Each device's sum of the bits of its part of each array: uint32 [devices] by name."""

    def local(*parts):
        return tuple(_bit_sum(part)[None] for part in parts)

    names = list(leaves)
    sums = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(specs[name] for name in names),
        out_specs=P(mesh.axis_names), check_vma=False,
    )(*(leaves[name] for name in names))  # fmt: skip
    return dict(zip(names, sums, strict=True))


def _bit_sum(part: jax.Array) -> jax.Array:
    if jnp.issubdtype(part.dtype, jnp.floating):
        part = jax.lax.bitcast_convert_type(part, f"uint{8 * part.dtype.itemsize}")
    bits = part.reshape(-1).astype(jnp.uint32)
    odd = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1
    return jnp.sum(bits * odd, dtype=jnp.uint32)


def unlike_copies(name: str, leaf: jax.Array, sums: np.ndarray) -> str:
    """Which devices hold another copy of a part than most that hold it; "" where all agree."""
    holders = collections.defaultdict(list)
    order = {device: number for number, device in enumerate(_where(leaf).mesh.devices.flat)}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders[str(index)].append(device)
    odd = []
    for devices in holders.values():
        found = [int(sums[order[device]]) for device in devices]
        (usual, count), *_ = collections.Counter(found).most_common(1)
        names = [_named(d) for d, value in zip(devices, found, strict=True) if value != usual]
        # Of two copies that differ nobody knows which is right.
        odd += [_named(d) for d in devices] if names and 2 * count == len(devices) else names
    return f"{name} is not the same on {', '.join(odd[:_SHOWN])}" if odd else ""


def unlike_results(mesh: Mesh, once: Sums, again: Sums) -> list[str]:
    """A line for each gradient that a device computed otherwise the second time."""
    devices = list(mesh.devices.flat)
    lines = []
    for name in once:
        odd = [_named(devices[n]) for n in np.flatnonzero(once[name] != again[name])]
        if odd:
            lines.append(f"the gradient of {name} came out otherwise on {', '.join(odd[:_SHOWN])}")
    return lines


def _where(leaf: jax.Array) -> NamedSharding:
    assert isinstance(leaf.sharding, NamedSharding)  # as all of a state
    return leaf.sharding


def _named(device: jax.Device) -> str:
    return f"device {device.id} of process {device.process_index}"


def _tell(step: int, found: list[str]) -> None:
    found = [line for line in found if line]
    if found:
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CorruptionError(
            f"silent corruption at step {step}: {'; '.join(found[:_SHOWN])}{more}. Take the device "
            "out of the run, and go on from a checkpoint before this step."
        )


def _compiled(mesh: Mesh, sums: Callable[..., Any]) -> Callable[..., Any]:
    """With results that every process can read."""
    return jax.jit(sums, out_shardings=NamedSharding(mesh, P()))


def _on_devices(state: TrainState) -> dict[str, jax.Array]:
    """The arrays of a state by name, without those that lie in the hosts' memory."""
    leaves = named_leaves(state._asdict())
    usual = jax.local_devices()[0].default_memory().kind
    return {n: leaf for n, leaf in leaves.items() if leaf.sharding.memory_kind in (None, usual)}
