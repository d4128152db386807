"""Wrong arguments of the operators: one line that names what was given and what is allowed."""

import inspect

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.kda import kda, kda_fused
from pallas_kernels.linear_xent import linear_xent
from pallas_kernels.permute import permute, plan_permute, unpermute
from pallas_kernels.short_conv import short_conv


def floats(*shape):
    return np.ones(shape, np.float32)


def ints(*shape):
    return np.ones(shape, np.int32)


PLAN = plan_permute(jnp.zeros((4, 2), jnp.int32), 3)
ARGUMENTS = {
    kda: {
        "q": floats(1, 4, 2, 8), "k": floats(1, 4, 2, 8), "v": floats(1, 4, 2, 8),
        "log_decay": floats(1, 4, 2, 8), "beta": floats(1, 4, 2),
    },
    kda_fused: {
        "q": floats(1, 4, 2, 8), "k": floats(1, 4, 2, 8), "v": floats(1, 4, 2, 8),
        "gate": floats(1, 4, 2, 8), "beta_logits": floats(1, 4, 2), "a_log": floats(2),
        "dt_bias": floats(2, 8),
    },
    short_conv: {"x": floats(1, 5, 4), "taps": floats(2, 4)},
    gated_norm: {"x": floats(3, 4), "gate": floats(3, 4), "weight": floats(4), "eps": 1e-5},
    attn_res: {
        "query": floats(4), "norm_weight": floats(4), "sources": floats(2, 1, 3, 4), "eps": 1e-5,
    },
    plan_permute: {"expert_ids": ints(4, 2), "num_experts": 3},
    permute: {"x": floats(4, 3), "plan": PLAN},
    unpermute: {"rows": floats(8, 3), "weights": floats(4, 2), "plan": PLAN},
    linear_xent: {"x": floats(3, 4), "weight": floats(5, 4), "labels": ints(3)},
    grouped_matmul: {"rows": floats(3, 4), "weights": floats(2, 4, 6), "group_sizes": ints(2)},
}  # fmt: skip

WRONG = [
    (kda, {"q": floats(1, 4, 2)}, r"q has shape \(1, 4, 2\); give an array \[B, T, N, H\]"),
    (kda, {"q": [1.0]}, "q has type list; give an array"),
    (kda, {"q": floats(0, 4, 2, 8)}, "B at least 1"),
    (kda, {"q": floats(1, 0, 2, 8)}, "T at least 1"),
    (kda, {"q": floats(1, 4, 0, 8)}, "N at least 1"),
    (kda, {"q": floats(1, 4, 2, 0)}, "H at least 1"),
    (kda, {"v": floats(1, 4, 0, 8)}, "Nv at least 1"),
    (kda, {"q": ints(1, 4, 2, 8)}, "q is int32; give bfloat16 or float32"),
    (kda, {"segment_ids": floats(1, 4)}, "segment_ids is float32; give integers"),
    (kda, {"chunk": 64.0}, "chunk=64.0 is not a power of two"),
    (kda, {"chunk": "64"}, "chunk='64' is not a power of two"),
    (kda_fused, {"a_log": ints(2)}, "a_log is int32"),
    (short_conv, {"x": ints(1, 5, 4)}, "x is int32"),
    (short_conv, {"segment_ids": floats(1, 5)}, "segment_ids is float32"),
    (gated_norm, {"x": ints(3, 4)}, "x is int32"),
    (attn_res, {"sources": floats(2, 3, 4)}, r"sources has shape .*give an array \[X, B, T, D\]"),
    (attn_res, {"query": floats(1)}, r"query has shape \(1,\); sources .* need \(4,\)"),
    (attn_res, {"sources": ints(2, 1, 3, 4)}, "sources is int32"),
    (attn_res, {"num_sources": 2.0}, "num_sources=2.0 is a float; give an integer"),
    (attn_res, {"eps": -5.0}, "eps=-5.0 is negative"),
    (plan_permute, {"expert_ids": floats(4, 2)}, "expert_ids is float32"),
    (plan_permute, {"expert_ids": ints(4)}, r"expert_ids has shape \(4,\)"),
    (plan_permute, {"num_experts": 3.0}, "num_experts=3.0 is no integer"),
    (permute, {"x": floats(4)}, r"x has shape \(4,\); give an array \[M, L\]"),
    (permute, {"x": ints(4, 3)}, "x is int32"),
    (permute, {"plan": tuple(PLAN)}, "plan is a tuple; give what plan_permute returns"),
    (unpermute, {"rows": floats(8)}, r"rows has shape \(8,\)"),
    (linear_xent, {"x": floats(4)}, r"x has shape \(4,\); give an array \[M, D\]"),
    (linear_xent, {"weight": floats(5, 4, 1)}, "weight has shape"),
    (linear_xent, {"weight": floats(0, 4)}, "V at least 1"),
    (linear_xent, {"labels": ints(3, 1)}, "labels has shape"),
    (linear_xent, {"labels": floats(3)}, "labels is float32"),
    (linear_xent, {"rows_per_chunk": 2.5}, "rows_per_chunk=2.5 is no integer"),
    (linear_xent, {"soft_cap": float("nan")}, "soft_cap=nan"),
    (linear_xent, {"z_loss": float("nan")}, "z_loss=nan"),
    (grouped_matmul, {"weights": floats(4, 6)}, r"weights has shape \(4, 6\)"),
    (grouped_matmul, {"weights": floats(0, 4, 6)}, "E at least 1"),
    (grouped_matmul, {"rows": floats(3, 0)}, "K at least 1"),
    (grouped_matmul, {"weights": floats(2, 4, 0)}, "F at least 1"),
    (grouped_matmul, {"weights": np.ones((2, 4, 6), np.uint8)}, "weights is uint8"),
    (grouped_matmul, {"group_sizes": floats(2)}, "group_sizes is float32"),
    (grouped_matmul, {"lora": (floats(2, 4, 2),)}, r"lora is a tuple, not two adapters"),
    (grouped_matmul, {"lora": (floats(2, 4, 0), floats(2, 0, 6))}, "Q at least 1"),
    (grouped_matmul, {"activation": "situ", "situ_betas": (None, 25.0)}, "no pair of positive"),
    (grouped_matmul, {"activation": "situ", "situ_betas": (1.0,)}, "no pair of positive"),
]


@pytest.mark.parametrize("op, change, message", WRONG)
def test_wrong_arguments_are_named(monkeypatch, op, change, message):
    # without the test run's own checks of signatures, as users call them
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message) as error:
        inspect.unwrap(op)(**(ARGUMENTS[op] | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("op", ARGUMENTS)
def test_right_arguments_pass(op):
    """Or the table above would prove nothing."""
    given = ARGUMENTS[op].items()
    arrays = {n: jnp.asarray(a) if isinstance(a, np.ndarray) else a for n, a in given}
    jax.eval_shape(lambda: op(**arrays))


@pytest.mark.parametrize("impl", ["chunked", "ref", "pallas_gpu"])
def test_no_rows_have_no_loss(impl):
    def loss(x, weight):
        return linear_xent(x, weight, jnp.zeros(0, jnp.int32), impl=impl)

    (total, count), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        jnp.ones((0, 4)), jnp.ones((5, 4))
    )
    assert total == 0 and count == 0
    np.testing.assert_array_equal(grads[1], jnp.zeros((5, 4)))
