"""Checks of arguments that operators share: each raises one line, what was given and what may be.

Only shapes and dtypes are looked at, so that they cost nothing once a program is traced. An
argument that is None is left out.
"""

import numbers
from typing import Any

import jax.numpy as jnp


def check_rank(name: str, x: Any, dims: str) -> None:
    """`dims`: letters of the dimensions, "M D"; one with a lower bound of 1 ends in "+", "V+".

    Raises:
      ValueError: x is no array, has another number of dimensions, or is empty where it may not be.
    """
    if x is None:
        return
    letters = dims.split()
    shape = getattr(x, "shape", None)
    given = f"shape {tuple(shape)}" if shape is not None else f"type {type(x).__name__}"
    allowed = f"an array [{', '.join(letters).replace('+', '')}]"
    if shape is None or len(shape) != len(letters):
        raise ValueError(f"{name} has {given}; give {allowed}.")
    for letter, size in zip(letters, shape, strict=True):
        if letter.endswith("+") and size < 1:
            raise ValueError(f"{name} has {given}; give {allowed} with {letter[:-1]} at least 1.")


def check_float(**arrays: Any) -> None:
    """Raises ValueError unless all are floating."""
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}; give bfloat16 or float32.")


def check_int(**arrays: Any) -> None:
    """Raises ValueError unless all are integers; booleans are none."""
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} is {x.dtype}; give integers, int32 for example.")


def is_int(number: Any) -> bool:
    """Whether `number` is a Python or numpy integer, and not a truth value."""
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)
