"""Checks of arguments that operators share: each raises one line, what was given and what may be.

Only shapes, dtypes and Python numbers are looked at, so that they cost nothing once a program is
traced. An argument that is None is left out.
"""

import math
import numbers
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
    """Raises ValueError unless all are floating, TypeError where one is no array."""
    for name, x in arrays.items():
        if x is not None:
            check_array(name, x)
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}; give bfloat16 or float32.")


def check_int(**arrays: Any) -> None:
    """Raises ValueError unless all are integers, not booleans; TypeError where one is no array."""
    for name, x in arrays.items():
        if x is not None:
            check_array(name, x)
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} is {x.dtype}; give integers, int32 for example.")


def check_array(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is an array, of JAX or numpy."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} is {_told(x)}; give an array.")


def check_arrays(**arrays: Any) -> None:
    """Raises TypeError unless all are arrays; None is none."""
    for name, x in arrays.items():
        check_array(name, x)


def check_number(name: str, number: Any) -> float:
    """A finite Python or numpy number as a float.

    Raises:
      TypeError: it is none; one that is traced or an array must be a Python number before.
      ValueError: it is not finite.
    """
    if not isinstance(number, numbers.Real) or isinstance(number, bool):
        raise TypeError(f"{name} is {_told(number)}; give a Python number, fixed before tracing.")
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; give a finite number.")
    return float(number)


def check_flag(name: str, flag: Any) -> bool:
    """True or False. Raises TypeError for anything else, such as a traced truth value."""
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"{name} is {_told(flag)}; give True or False, fixed before tracing.")
    return bool(flag)


def check_count(name: str, number: Any, most: int) -> int:
    """An integer from 1 to `most`.

    Raises:
      TypeError: it is no integer of Python or numpy.
      ValueError: it is out of bounds.
    """
    if not is_int(number):
        raise TypeError(f"{name} is {_told(number)}; give an integer from 1 to {most}.")
    if not 1 <= number <= most:
        raise ValueError(f"{name}={number}; give an integer from 1 to {most}.")
    return int(number)


def check_offset(name: str, offset: Any, length: int) -> jax.Array:
    """The position of the first of `length` queries as an int32 scalar; it may be traced.

    Raises:
      TypeError: it is neither an integer nor an integer array without dimensions.
      ValueError: it is a Python integer so large that a query's position is no int32.
    """
    if is_int(offset):
        least, most = -(2**31), 2**31 - 1 - length
        if not least <= offset <= most:
            raise ValueError(f"{name}={offset}; give an integer from {least} to {most}.")
        return jnp.asarray(int(offset), jnp.int32)
    scalar = getattr(offset, "shape", None) == ()
    if not scalar or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(f"{name} is {_told(offset)}; give an integer, or an int32 array [].")
    return jnp.asarray(offset, jnp.int32)


def _told(x: Any) -> str:
    """An argument in a few words: an array by dtype and shape, else its type and value."""
    shape = getattr(x, "shape", None)
    if shape is not None:
        traced = "traced " if isinstance(x, jax.core.Tracer) else ""
        return f"a {traced}{x.dtype} array {list(shape)}"
    return "None" if x is None else f"{reprlib.repr(x)} ({type(x).__name__})"


def is_int(number: Any) -> bool:
    """Whether `number` is a Python or numpy integer, and not a truth value."""
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)
