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
from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.kda import kda, kda_fused
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.linear_xent import linear_xent
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.permute import permute, plan_permute, unpermute
from pallas_kernels.short_conv import short_conv
from pallas_kernels.sparse_flash_attention import sparse_flash_attention


def floats(*shape):
    return np.ones(shape, np.float32)


def ints(*shape):
    return np.ones(shape, np.int32)


PLAN = plan_permute(jnp.zeros((4, 2), jnp.int32), 3)
INDEX = {"q_idx": floats(1, 4, 2, 8), "k_idx": floats(1, 4, 8), "w_idx": floats(1, 4, 2)}
MAIN = {
    "q_latent": floats(1, 4, 2, 8), "q_rope": floats(1, 4, 2, 4), "latent": floats(1, 4, 8),
    "k_rope": floats(1, 4, 4), "scale": 0.2,
}  # fmt: skip
ARGUMENTS = {
    lightning_indexer: INDEX | {"top_k": 2},
    sparse_flash_attention: MAIN | {"indices": ints(1, 4, 3)},
    indexer_kl: INDEX | MAIN | {"lse": floats(1, 4, 2)},
    mla_attention: {name: floats(1, 4, 2, 8) for name in "qkv"} | {"scale": 0.2},
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
    (lightning_indexer, {"q_idx": [1.0]}, r"q_idx is \[1.0\] \(list\); give an array"),
    (lightning_indexer, {"k_idx": None}, "k_idx is None; give an array"),
    (lightning_indexer, {"w_idx": floats(1, 4, 2).astype(np.float16)}, "w_idx is float16; give bf"),
    (lightning_indexer, {"q_idx": floats(1, 4, 0, 8)}, "U at least 1"),
    (lightning_indexer, {"k_idx": floats(1, 0, 8)}, "S at least 1"),
    (lightning_indexer, {"segment_ids": [[1] * 4]}, "segment_ids is .*; give an array"),
    *(
        (lightning_indexer, {"top_k": top_k}, "top_k.* give an integer from 1 to 65536")
        for top_k in (0, 2.5, "4", None, True, 2**31)
    ),
    *(
        (lightning_indexer, {"q_offset": offset}, "q_offset is .*; give an integer, or an int32")
        for offset in ("a", None, 1.5, [1], floats(), ints(2))
    ),
    (lightning_indexer, {"q_offset": 2**31 - 4}, "q_offset=2147483644; give an integer from"),
    (lightning_indexer, {"approx_recall": "x"}, r"approx_recall is 'x' \(str\); give a Python"),
    (lightning_indexer, {"order": ["score"]}, "order=.*Use"),
    (lightning_indexer, {"impl": 3}, "impl=3 is no name. Use one of"),
    *(
        (sparse_flash_attention, {"scale": scale}, "scale is .*; give a Python number")
        for scale in (None, "a", 1j, True, floats())
    ),
    *(
        (sparse_flash_attention, {"scale": float(scale)}, f"scale is {scale}; give a finite")
        for scale in ("nan", "inf")
    ),
    (sparse_flash_attention, {"deterministic": "no"}, "deterministic is 'no' .*; give True or"),
    (sparse_flash_attention, {"indices": None}, "indices is None; give an array"),
    (sparse_flash_attention, {"indices": ints(1, 4, 0)}, "J at least 1"),
    (sparse_flash_attention, {"latent": floats(1, 0, 8)}, "S at least 1"),
    (indexer_kl, {"lse": None}, "lse is None; give an array"),
    (indexer_kl, {"q_offset": 10**10}, "q_offset=10000000000; give an integer"),
    (mla_attention, {"q": floats(1, 0, 2, 8)}, "T at least 1"),
    (mla_attention, {"causal": 1}, r"causal is 1 \(int\); give True or False"),
    (mla_attention, {"indices": [[[1]]]}, "indices is .*; give an array"),
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
    (linear_xent, {"soft_cap": float("nan")}, "soft_cap is nan"),
    (linear_xent, {"z_loss": float("nan")}, "z_loss is nan"),
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
    with pytest.raises((ValueError, TypeError), match=message) as error:
        inspect.unwrap(op)(**(ARGUMENTS[op] | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("op", ARGUMENTS)
def test_right_arguments_pass(op):
    """Or the table above would prove nothing."""
    given = ARGUMENTS[op].items()
    arrays = {n: jnp.asarray(a) if isinstance(a, np.ndarray) else a for n, a in given}
    jax.eval_shape(lambda: op(**arrays))


@pytest.mark.parametrize("name", ["scale", "deterministic"])
def test_a_traced_option_is_named(monkeypatch, name):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    op = inspect.unwrap(sparse_flash_attention)
    traced = lambda value: op(**(ARGUMENTS[sparse_flash_attention] | {name: value}))  # noqa: E731
    with pytest.raises(TypeError, match=f"{name} is a traced .* array.*; give .* before tracing"):
        jax.eval_shape(traced, True if name == "deterministic" else 0.2)


@pytest.mark.parametrize("impl", ["chunked", "ref", "pallas_gpu"])
def test_no_rows_have_no_loss(impl):
    def loss(x, weight):
        return linear_xent(x, weight, jnp.zeros(0, jnp.int32), impl=impl)

    (total, count), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        jnp.ones((0, 4)), jnp.ones((5, 4))
    )
    assert total == 0 and count == 0
    np.testing.assert_array_equal(grads[1], jnp.zeros((5, 4)))


@pytest.mark.parametrize("op", list(ARGUMENTS), ids=lambda op: op.__name__)
@pytest.mark.parametrize("wrong", [None, [1.0, 2.0], 0.5], ids=["none", "list", "number"])
def test_what_is_no_array_is_named(monkeypatch, op, wrong):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    given = ARGUMENTS[op]
    for name in [name for name, value in given.items() if isinstance(value, np.ndarray)]:
        with pytest.raises((TypeError, ValueError)) as error:
            op(**given | {name: wrong})
        assert name in str(error.value) and "\n" not in str(error.value), (name, str(error.value))
