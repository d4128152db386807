"""What every test shares: eight CPU devices, checked signatures, the marks of the tiers."""

import gc
import importlib.metadata
import os
import tempfile
from pathlib import Path

# XLA reads its flags once, when the first backend starts, so they are set before jax is imported.
# Programs here run once or twice, and what they cost is their compilation. In one piece and without
# the newer emitters of fusions (a flag of jax 0.10 alone) they compile in 0.4 to 0.6 of the time.
_FLAGS = {"--xla_force_host_platform_device_count": "8"}
_FLAGS["--xla_cpu_parallel_codegen_split_count"] = "1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
_given = os.environ.get("XLA_FLAGS", "")
_added = (f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given)
os.environ["XLA_FLAGS"] = " ".join((_given, *_added)).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What one file has compiled serves the next one, the other processes of the run and those that the
# tests start: a fifth of the time, since programs are forgotten with their file (see below).
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="moejax-compiled-")  # goes with this process
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

import tests.shape_checks  # noqa: E402, F401

# Shapes and dtypes in signatures are checked at every call of the test run.
_HOOK = jaxtyping.install_import_hook(
    ["moejax", "pallas_kernels"], "tests.shape_checks.check_arrays"
)


# Whole files of the quick tier, beside the tests that carry its mark: between them they touch
# each library whose next release could break us (jax, flax, optax, orbax, grain, tokenizers).
_QUICK = (
    "checkpoint/test_checkpoints.py",
    "data/test_packing.py",
    "data/test_pipeline.py",
    "data/test_tokenize.py",
    "kernels/test_permute.py",
    "observability/test_metrics.py",
    "optim/test_build.py",
    "optim/test_schedule.py",
)


# Folders whose files share runs that take a minute: one process of several takes them whole.
_TOGETHER = ("cli", "e2e")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """One of several processes runs a file whole, or such a folder.

    xdist's own groups, by marks, are lost on the way with pytest 9.
    """
    from xdist.scheduler import LoadScopeScheduling  # where this is called, it is there

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.removeprefix("tests/").partition("/")[0]
            return folder if folder in _TOGETHER else file

    return WholeFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the quick tier.

    Skips what needs a GPU where there is none, and says what to do.
    """
    here = Path(__file__).parent
    quick = {here / name for name in _QUICK}
    if missing := [str(path) for path in quick if not path.exists()]:
        raise pytest.UsageError(f"tests/conftest.py lists {missing}, which are not there")
    for item in items:
        if item.path in quick:
            item.add_marker("quick")
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


@pytest.fixture(autouse=True)
def room_for_programs():
    """Forgets programs in a file of hundreds: each holds some of the 65,530 maps of a process."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Programs of a file go with it: a process that keeps them all grows by gigabytes."""
    yield
    jax.clear_caches()
    gc.collect()
