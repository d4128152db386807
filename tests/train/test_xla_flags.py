"""Options of the compiler: by platform and level, and none that it does not know."""

from __future__ import annotations

import warnings

import jax
import pytest

from moejax.config import TrainConfig
from moejax.train.xla_flags import FLAGS, LEVELS, accepted, compiler_options, flags_for
from tests.sharded.meshes import FSDP8, ONE, mesh_of


def test_levels_add_up_and_platforms_are_apart():
    assert flags_for("off", "gpu") == flags_for("ahead", "cpu") == {}
    for platform in ("gpu", "tpu"):
        sizes = [len(flags_for(level, platform)) for level in LEVELS]
        assert sizes == sorted(sizes) and sizes[2] > 0
        assert flags_for("within", platform).items() <= flags_for("ahead", platform).items()
    assert flags_for("ahead", "cuda") == flags_for("ahead", "gpu")
    assert not flags_for("ahead", "gpu").keys() & flags_for("ahead", "tpu").keys()
    assert all(flag.why and flag.level in LEVELS for flag in FLAGS)
    assert TrainConfig().prefetch in LEVELS


def test_a_name_the_compiler_lacks_is_left_out_with_a_warning():
    """The TPU's names are unknown to the CPU's compiler; a value of the wrong sort is an error."""
    mesh, known = mesh_of(FSDP8), {"xla_backend_optimization_level": 0}
    with pytest.warns(UserWarning, match="has no option xla_tpu_") as said:
        assert accepted(known | {"xla_tpu_one": True, "xla_tpu_two": True}, mesh) == known
    assert 1 <= len(said) <= 2
    with pytest.raises(jax.errors.JaxRuntimeError):
        accepted({"xla_backend_optimization_level": "high"}, mesh)


def test_nothing_is_asked_of_a_cpu_or_for_one_device():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler_options("ahead", mesh_of(FSDP8)) == {}
        assert compiler_options("ahead", mesh_of(ONE)) == {}
