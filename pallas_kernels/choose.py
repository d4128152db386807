"""Which implementation of an operator runs, and why the others do not."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

_PLATFORMS = ("cpu", "gpu", "tpu")
PREFERENCES = ("auto", "ref", "chunked", "pallas", "pallas_gpu", "pallas_tpu")
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_chip: contextvars.ContextVar[str] = contextvars.ContextVar("chip", default="")
_preferred: contextvars.ContextVar[str] = contextvars.ContextVar("preferred", default="auto")
_choices: contextvars.ContextVar[dict[str, tuple["Choice", ...]] | None] = contextvars.ContextVar(
    "choices", default=None
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs an operator: the implementation, and why others that were asked do not.

    Attributes:
      impl: its name.
      refused: names and reasons of those that were asked before it.
      interpreted: a kernel for other hardware, run by Pallas' interpreter: right and slow.
    """

    impl: str
    refused: tuple[tuple[str, str], ...] = ()
    interpreted: bool = False


def target_platform() -> str:
    """Platform that operators are being lowered for: "cpu", "gpu" or "tpu".

    JAX's default backend unless `lowering_for` says otherwise.
    """
    chosen = _platform.get()
    if chosen is not None:
        return chosen
    backend = jax.default_backend()
    return backend if backend in ("cpu", "tpu") else "gpu"  # plugins call themselves cuda, rocm


def target_chip() -> str:
    """What operators are being lowered for, in lower case: "h200", "nvidia b200", or ""."""
    chosen = _platform.get()
    return jax.devices()[0].device_kind.lower() if chosen is None else _chip.get()


@contextlib.contextmanager
def lowering_for(platform: str, chip: str = "") -> Iterator[None]:
    """Makes `target_platform()` answer `platform`, so that a CPU can lower for another machine.

    `chip` is what `target_chip()` then answers.

    The choice is made while tracing: a function that `jax.jit` has already traced keeps its own.

    Raises:
      ValueError: `platform` is not one of "cpu", "gpu", "tpu".
    """
    if platform not in _PLATFORMS:
        raise ValueError(f"platform={platform!r} is unknown. Use one of {', '.join(_PLATFORMS)}.")
    token, chip_token = _platform.set(platform), _chip.set(chip)
    try:
        yield
    finally:
        _platform.reset(token)
        _chip.reset(chip_token)


@contextlib.contextmanager
def preferring(impl: str) -> Iterator[None]:
    """Operators that are called without `impl` take this one where they have it and it can run.

    Where they cannot, the platform's own order decides. "pallas" is the platform's kernel, "auto"
    leaves the choice to the platform.

    Raises:
      ValueError: `impl` is none of `PREFERENCES`.
    """
    if impl not in PREFERENCES:
        raise ValueError(f"impl={impl!r} is unknown. Use one of {', '.join(PREFERENCES)}.")
    token = _preferred.set(impl)
    try:
        yield
    finally:
        _preferred.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[dict[str, tuple[Choice, ...]]]:
    """Collects what was chosen for each operator while tracing, by the operator's name.

    One operator may be called with several shapes, of which an implementation takes some.
    """
    choices: dict[str, tuple[Choice, ...]] = {}
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


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
        names = tuple(order.get(platform, order["cpu"]))
        first = _preferred.get()
        if first == "auto":
            return names
        first = f"pallas_{platform}" if first == "pallas" and platform != "cpu" else first
        return (first, *(name for name in names if name != first))
    if not isinstance(impl, str):
        allowed = ", ".join((*impls, "pallas"))
        raise ValueError(f"impl={impl!r} is no name. Use one of {allowed}, or None to choose.")
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
    reasons: list[NotImplementedError] = []
    for name in names:
        try:
            if name not in impls:  # preferred for all operators, of which this one has none
                raise NotImplementedError(
                    "there are no kernels for CPUs"
                    if name == "pallas"
                    else "there is no such implementation"
                )
            result = impls[name](*args, **kwargs)
        except NotImplementedError as reason:
            reason.add_note(f"implementation: {name}")
            reasons.append(reason)
            continue
        _record(impls[name], name, zip(names, reasons, strict=False))
        return result
    if len(reasons) == 1:
        raise reasons[0]
    raise ExceptionGroup(f"no implementation runs these arguments: {', '.join(names)}", reasons)


def _record(chosen: Callable[..., Any], name: str, refused: Iterable[tuple[str, Any]]) -> None:
    choices = _choices.get()
    if choices is not None:
        folder, function = chosen.__module__.split(".")[-2], chosen.__name__
        op = folder if folder == function else f"{folder}.{function}"
        reasons = tuple((other, str(reason)) for other, reason in refused)
        foreign = name.startswith("pallas_") and name != f"pallas_{target_platform()}"
        choice = Choice(name, reasons, interpreted=foreign)
        if choice not in (known := choices.get(op, ())):
            choices[op] = (*known, choice)
