"""The quick cases of the kernel gate lower for GPUs and TPUs: unsupported operations, sizes that
are no power of two and blocks that do not fit show here, without either machine's compiler.
"""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import pallas_kernels
from pallas_kernels import _gpu
from pallas_kernels.lowering import lowered

FOLDERS = sorted(p.parent for p in pathlib.Path(pallas_kernels.__file__).parent.glob("*/specs.py"))


def has_kernel(folder, platform):
    """Whether a file there calls one; a `pallas_tpu.py` may only say why there is none."""
    files = folder.glob(f"pallas_{platform}*.py")
    return any(f"_{platform}.call(" in file.read_text() for file in files)


KERNELS = [
    (folder.name, platform)
    for platform in ("gpu", "tpu")
    for folder in FOLDERS
    if has_kernel(folder, platform)
]
CALLS = {"gpu": "triton", "tpu": "tpu_custom_call"}


@pytest.mark.parametrize(("op", "platform"), KERNELS)
def test_quick_cases_lower(op, platform):
    cases = importlib.import_module(f"pallas_kernels.{op}.specs").gate_cases(platform)
    quick = [case for case in cases if case.quick]
    assert quick, "name a quick case: a kernel that nothing lowers is not checked"
    for case in quick:
        assert CALLS[platform] in lowered(case.fn, case.args, platform), case.name


def _kernel(body, shape):
    def fn(x):
        spec = pl.BlockSpec(shape, lambda i: (0,) * len(shape))
        out = jax.ShapeDtypeStruct(shape, x.dtype)
        return _gpu.call(
            body, name="probe", grid=(1,), in_specs=[spec], out_specs=spec, out_shape=out
        )(x)

    return fn, [jax.ShapeDtypeStruct(shape, jnp.float32)]


def test_what_a_gpu_cannot_do_is_refused():
    def copy(x, y):
        y[...] = x[...]

    def sort(x, y):
        y[...] = jnp.sort(x[...])

    assert CALLS["gpu"] in lowered(*_kernel(copy, (16, 32)), "gpu")
    with pytest.raises(Exception, match="power"):
        lowered(*_kernel(copy, (16, 48)), "gpu")
    with pytest.raises(Exception, match="sort"):
        lowered(*_kernel(sort, (16, 32)), "gpu")
