"""An operator at a real size on the present device, with what it is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Arrays = tuple[jax.Array, ...]


class DeviceCase(NamedTuple):
    """One operator at one size.

    Attributes:
      op: folder of the operator.
      size: which, in a few words.
      make: key -> arguments, drawn on the device.
      call: (*arguments, impl=) -> arrays.
      argnums: arguments to differentiate; () for what has no gradient.
      flops: floating-point operations that any implementation needs, forward and backward.
      tolerance: largest relative RMS error of an output or gradient in bfloat16.
      kept: bytes that the forward must leave to the backward, written and read.
      least: bytes that must move, forward and backward; None: all arguments and results once.
      others: name -> function of the same arguments, plain XLA or another library's. One that
        imports a library raises ImportError where it is absent.
      torch: names in `torch_side` to compare with, and `dims`, what they are told.
      target: what was set as the goal, in words.
    """

    op: str
    size: str
    make: Callable[[jax.Array], Arrays]
    call: Callable[..., Any]
    argnums: tuple[int, ...]
    flops: tuple[float, float]
    tolerance: float
    kept: int = 0
    least: tuple[int, int] | None = None
    others: Mapping[str, Callable[..., Any]] = {}
    torch: tuple[str, ...] = ()
    dims: Mapping[str, float | None] = {}
    target: str = ""

    @property
    def name(self) -> str:
        return f"{self.op} {self.size}"

    def implementation(self, impl: str) -> Callable[..., Any]:
        """The operator by one of its own implementations."""
        return lambda *args: self.call(*args, impl=impl)

    def function(self, name: str) -> Callable[..., Any]:
        """One of `others`, or the operator's own implementation of that name."""
        return self.others[name] if name in self.others else self.implementation(name)

    def has_floats(self) -> bool:
        """Whether it gives numbers, whose errors can be told."""
        args = jax.eval_shape(self.make, jax.random.key(0))
        return bool(floating(jax.eval_shape(self.implementation("chunked"), *args)))

    def cotangents(self, key: jax.Array, args: Arrays) -> Arrays:
        """Normal numbers, one array for every floating output."""
        outputs = floating(jax.eval_shape(self.implementation("chunked"), *args))
        keys = jax.random.split(key, max(len(outputs), 1))
        return tuple(
            jax.random.normal(k, o.shape, jnp.float32).astype(o.dtype)
            for k, o in zip(keys, outputs, strict=False)
        )

    def traffic(self, args: Arrays) -> tuple[int, int]:
        """Least bytes forward and backward."""
        if self.least is not None:
            return self.least
        outputs = nbytes(jax.eval_shape(self.implementation("chunked"), *args))
        grads = nbytes([args[i] for i in self.argnums])
        return nbytes(args) + outputs, nbytes(args) + outputs + grads + self.kept


def forward(fn: Callable[..., Any]) -> Callable[..., Any]:
    """(arguments, cotangents) -> outputs."""
    return lambda args, cotangents: fn(*args)


def both_directions(fn: Callable[..., Any], argnums: Sequence[int]) -> Callable[..., Any]:
    """(arguments, cotangents) -> floating outputs and gradients."""

    def run(args: Arrays, cotangents: Arrays) -> Any:
        def of_some(*some: jax.Array) -> list[jax.Array]:
            whole = list(args)
            for i, x in zip(argnums, some, strict=True):
                whole[i] = x
            return floating(fn(*whole))

        outputs, pullback = jax.vjp(of_some, *(args[i] for i in argnums))
        pairs = zip(cotangents, outputs, strict=True)
        return outputs, pullback([c.astype(o.dtype) for c, o in pairs])

    return run


def floating(tree: Any) -> list[Any]:
    """The floating leaves."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def upcast(arrays: Arrays) -> Arrays:
    """Low-precision floats as float32, the rest as it is."""
    return tuple(
        x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays
    )


def nbytes(tree: Any) -> int:
    """Bytes of arrays or of their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@jax.jit
def relative_errors(actual: list[jax.Array], expected: list[jax.Array]) -> list[jax.Array]:
    """Of each array the root mean square of its error over that of what is expected."""

    def one(a: jax.Array, e: jax.Array) -> jax.Array:
        e = e.astype(jnp.float32)
        error = jnp.sqrt(jnp.mean((a.astype(jnp.float32) - e) ** 2))
        return error / jnp.maximum(jnp.sqrt(jnp.mean(e**2)), 1e-30)

    return [one(a, e) for a, e in zip(actual, expected, strict=True)]
