"""What every test shares: eight CPU devices, checked signatures, a compilation cache."""

import os

# XLA reads its flags once, when the first backend starts, so they are set before jax is imported.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

import tests.shape_checks  # noqa: E402, F401

# Shapes and dtypes in signatures are checked at every call of the test run.
_HOOK = jaxtyping.install_import_hook(
    ["moejax", "pallas_kernels"], "tests.shape_checks.check_arrays"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, and says how to run it."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="no GPU here; with one, set JAX_PLATFORMS=cuda,cpu")
        for item in gpu_items:
            item.add_marker(skip)


@pytest.fixture
def strict_promotion():
    """Arithmetic between dtypes that differ raises inside the test."""
    with jax.numpy_dtype_promotion("strict"):
        yield
