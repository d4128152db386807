"""The checker behind jaxtyping's import hook: beartype where a signature speaks of arrays."""

import typing
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping

# An int is a float, as it is for type checkers (PEP 484).
_beartype = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def check_arrays(function: Callable) -> Callable:
    """Checks the calls of `function` if its signature says anything of shapes or dtypes.

    Others are left to mypy, which has no trouble with protocols and forward references.
    """
    annotations = getattr(function, "__annotations__", {}).values()
    return _beartype(function) if any(map(_speaks_of_arrays, annotations)) else function


def _speaks_of_arrays(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_speaks_of_arrays, typing.get_args(annotation)))
