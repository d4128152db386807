"""What a kernel has to compile as, on machines that do not have its device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class GateCase(NamedTuple):
    """One program of real size that must compile for a chip.

    Attributes:
      name: op, direction and size, as "kda forward K3".
      fn: a new function at every call of `gate_cases` (JAX caches traces of old ones).
      args: shapes of its arguments.
      matrix_bound: names of kernels in it that must use a GPU's large matrix instructions.
      quick: whether the short gate has it too.
      xla: operations of XLA alone, which the platform runs for lack of a kernel.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[jax.ShapeDtypeStruct, ...]
    matrix_bound: tuple[str, ...] = ()
    quick: bool = False
    xla: bool = False
