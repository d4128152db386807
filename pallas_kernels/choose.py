"""Which implementation of an operator runs, and why the others do not."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

_PLATFORMS = ("cpu", "gpu", "tpu")
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def target_platform() -> str:
    """Platform that operators are being lowered for: "cpu", "gpu" or "tpu".

    JAX's default backend unless `lowering_for` says otherwise.
    """
    chosen = _platform.get()
    if chosen is not None:
        return chosen
    backend = jax.default_backend()
    return backend if backend in ("cpu", "tpu") else "gpu"  # plugins call themselves cuda, rocm


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """Makes `target_platform()` answer `platform`, so that a CPU can lower for another machine.

    The choice is made while tracing: a function that `jax.jit` has already traced keeps its own.

    Raises:
      ValueError: `platform` is not one of "cpu", "gpu", "tpu".
    """
    if platform not in _PLATFORMS:
        raise ValueError(f"platform={platform!r} is unknown. Use one of {', '.join(_PLATFORMS)}.")
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def candidates(
    impls: Mapping[str, Callable[..., Any]],
    order: Mapping[str, Sequence[str]],
    impl: str | None = None,
) -> tuple[str, ...]:
    """Names to try, in order: those of the target platform, or the named one alone.

    Args:
      impls: name -> implementation.
      order: platform -> names, fastest first; every platform that is missing uses "cpu".
      impl: None, a name in `impls`, or "pallas" for the platform's own kernel.
    Raises:
      ValueError: `impl` is no implementation of any operator, or not one of this operator.
      NotImplementedError: a kernel was named that this operator does not have.
    """
    platform = target_platform()
    if impl is None:
        return tuple(order.get(platform, order["cpu"]))
    name = f"pallas_{platform}" if impl == "pallas" else impl
    if name in impls:
        return (name,)
    if name.startswith("pallas_") and name.removeprefix("pallas_") in _PLATFORMS:
        raise NotImplementedError(
            f"impl={impl!r}: there is no Pallas kernel of this operator for {name[7:]}. "
            f"Use one of {', '.join(impls)}, or impl=None."
        )
    allowed = ", ".join((*impls, "pallas"))
    raise ValueError(f"impl={impl!r} is unknown. Use one of {allowed}, or None to choose.")


def first_that_runs(
    impls: Mapping[str, Callable[..., Any]], names: Sequence[str], *args: Any, **kwargs: Any
) -> Any:
    """Result of the first implementation in `names` that accepts the arguments.

    An implementation declines by raising NotImplementedError with a reason while tracing.

    Raises:
      NotImplementedError: the only name declined (so a named implementation never falls back).
      ExceptionGroup: several names, all declined; it holds each reason.
    """
    reasons = []
    for name in names:
        try:
            return impls[name](*args, **kwargs)
        except NotImplementedError as reason:
            reason.add_note(f"implementation: {name}")
            reasons.append(reason)
    if len(reasons) == 1:
        raise reasons[0]
    raise ExceptionGroup(f"no implementation runs these arguments: {', '.join(names)}", reasons)
