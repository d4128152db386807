"""Which implementation runs: preferences, refusals, and what is recorded of both."""

import jax
import jax.numpy as jnp
import pytest

from moejax.config.training import KernelsConfig
from moejax.train.compile import compile_once, kernel_lines
from pallas_kernels import choose
from pallas_kernels.gated_norm import gated_norm

X = jnp.ones((2, 8))


def _norm(x):
    return gated_norm(x, x, x[0], eps=1e-6)


def _chosen(prefer: str) -> dict[str, tuple[choose.Choice, ...]]:
    with choose.preferring(prefer), choose.recording() as choices:
        _norm(X)
    return choices


@pytest.mark.parametrize(("prefer", "impl"), [("auto", "chunked"), ("ref", "ref")])
def test_a_preference_is_taken_where_an_operator_has_it(prefer, impl):
    assert _chosen(prefer) == {"gated_norm": (choose.Choice(impl),)}


def test_a_preference_that_an_operator_lacks_falls_back_and_says_why():
    refused = (("pallas", "there are no kernels for CPUs"),)
    assert _chosen("pallas") == {"gated_norm": (choose.Choice("chunked", refused),)}


def test_every_call_counts_and_an_interpreted_kernel_is_called_one():
    wide = jnp.ones((2, 5000))  # wider than the kernel takes
    with choose.preferring("pallas_gpu"), choose.recording() as choices:
        for x in (wide, X, X):
            jax.eval_shape(lambda x: gated_norm(x, x, x[0], eps=1e-6), x)
    chunked, kernel = choices["gated_norm"]
    assert (chunked.impl, kernel.impl) == ("chunked", "pallas_gpu")
    assert kernel.interpreted and not chunked.interpreted
    ((name, why),) = chunked.refused
    assert name == "pallas_gpu" and "5000" in why
    assert kernel_lines(choices) == [
        "operators by chunked: gated_norm",
        "operators by pallas_gpu (Pallas' interpreter, slow): gated_norm",
        f"not by pallas_gpu ({why}): gated_norm",
    ]


def test_a_named_implementation_beats_the_preference_and_never_falls_back():
    with choose.preferring("ref"), choose.recording() as choices:
        gated_norm(X, X, X[0], eps=1e-6, impl="chunked")
    assert choices["gated_norm"] == (choose.Choice("chunked"),)
    with pytest.raises(NotImplementedError, match="for cpu"):
        gated_norm(X, X, X[0], eps=1e-6, impl="pallas")


def test_a_preference_that_is_none_is_refused():
    with pytest.raises(ValueError, match="Use one of auto, ref"), choose.preferring("fast"):
        pass


def test_the_config_knows_the_same_preferences():
    for name in choose.PREFERENCES:
        assert KernelsConfig(impl=name).impl == name
    with pytest.raises(ValueError, match="kernels.impl"):
        KernelsConfig(impl="fast")


def test_a_compiled_program_tells_its_operators():
    with choose.preferring("pallas"):
        compiled = compile_once(_norm, X)
    assert kernel_lines(compiled.kernels) == [
        "operators by chunked: gated_norm",
        "not by pallas (there are no kernels for CPUs): gated_norm",
    ]
