"""Sparse attention, its indexer and the loss of that, against the numbers of transformers, fla-core
and jax-linear-attention: each array of each fixture, in float32 and bfloat16.

Where a fixture and `indexer_kl`, `lightning_indexer` differ: fla and jax-linear-attention give the
index score no U^-1/2 over the indexer's heads. The released DeepSeek-V3.2 has it, so we do, and the
fixtures' head weights come here times U^1/2.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import testing
from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.sparse_flash_attention import sparse_flash_attention
from tests.kernels.oracles import FLOAT32, Case, each, everywhere, limit, quick

# ---- sparse attention (transformers' indexers, fla-core)


def turned(x, cos, sin, interleaved):
    """Rotary pairs of the first R dims; x [B, T, heads, u], cos and sin [1, T, R]."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, :, None, :half], sin[:, :, None, :half]
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = (slice(None, None, 2), slice(1, None, 2))
    a, b = (head[..., s] for s in (pairs if interleaved else (slice(half), slice(half, None))))
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def check_choice(case, name, chosen, expected, dtype):
    """Equal sets in float32; in bfloat16 97 % of the keys."""
    case[name]
    chosen = np.asarray(chosen)[..., : expected.shape[-1]]
    if dtype == FLOAT32:
        np.testing.assert_array_equal(np.sort(chosen, -1), np.sort(expected, -1))
        return
    np.testing.assert_array_equal(chosen < 0, expected < 0)
    real = expected >= 0
    kept = (expected[..., :, None] == chosen[..., None, :]).any(-1)[real]
    assert kept.mean() >= 0.97, f"{case.group}: {kept.mean():.3f} of the keys"


def all_scores(args, impl, segment_ids=None):
    """The scores of every key a query sees, 0 elsewhere: those of the T best, put in place."""
    T = args[0].shape[1]
    top = quick(lightning_indexer, static_argnames=("top_k", "return_scores", "impl"))
    indices, scores = top(*args, top_k=T, segment_ids=segment_ids, return_scores=True, impl=impl)
    indices, scores = np.asarray(indices), np.asarray(scores)
    full = np.zeros((*indices.shape[:2], T + 1), np.float32)
    np.put_along_axis(full, np.where(indices < 0, T, indices), scores, -1)
    return indices, full[..., :T]


@everywhere
@each("dsa", "module")
def test_indexer_module(group, impl, dtype):
    """V3.2 turns halves in its indexer although its attention turns pairs; GLM-5 turns pairs."""
    case = Case("dsa", group)
    U, hidden = int(case["n_heads"]), case["hidden_states"]
    q = (case["q_resid"] @ case["weight/wq_b.weight"].T).reshape(*hidden.shape[:2], U, -1)
    k = hidden @ case["weight/wk.weight"].T
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = k * case["weight/k_norm.weight"] + case["weight/k_norm.bias"]
    glm = group == "indexer_glm"
    q, k = (turned(a, case["cos"], case["sin"], glm) for a in (q, k[:, :, None]))
    w = hidden @ case["weight/weights_proj.weight"].T
    indices, scores = all_scores([jnp.asarray(a, dtype) for a in (q, k[:, :, 0], w)], impl)
    visible = np.tril(np.ones(scores.shape[1:], bool))
    case.check("scores", np.where(visible, scores, 0), limit(dtype, 1e-5, 2e-2))
    best = indices[..., : int(case["topk"])]
    check_choice(case, "topk_indices", best, case["topk_indices"], dtype)
    case.done()


def grouped(x, num_heads):
    """[B, T, K, h] for K groups of heads -> [B, T, K*h], and each head's columns in it."""
    B, T, K, h = x.shape
    of_head = [slice(g * h, (g + 1) * h) for g in (n * K // num_heads for n in range(num_heads))]
    return x.reshape(B, T, K * h), of_head


def sparse_attention(q, k, v, indices, do, impl, dtype):
    """o, lse, dq, dk, dv: keys stand in for k_rope and values for the latent; grouped ones lie side
    by side, each head's query in its group's place."""
    N = q.shape[2]
    (keys, key_of), (values, value_of) = grouped(k, N), grouped(v, N)
    queries = np.zeros((*q.shape[:3], keys.shape[-1]), np.float32)
    upstream = np.zeros((*q.shape[:3], values.shape[-1]), np.float32)
    for n in range(N):
        queries[:, :, n, key_of[n]] = q[:, :, n]
        upstream[:, :, n, value_of[n]] = do[:, :, n]
    inputs = {
        "q_latent": np.zeros_like(upstream), "q_rope": queries, "latent": values, "k_rope": keys,
    }  # fmt: skip
    inputs = {name: jnp.asarray(a, dtype) for name, a in inputs.items()}
    (out, lse), grads = testing.output_and_vjp(
        sparse_flash_attention,
        inputs | {"indices": jnp.asarray(indices, jnp.int32)},
        wrt=["q_rope", "latent", "k_rope"],
        cotangents=[upstream, np.zeros(q.shape[:3], np.float32)],
        scale=q.shape[-1] ** -0.5,
        impl=impl,
    )
    o = jnp.stack([out[:, :, n, value_of[n]] for n in range(N)], 2)
    dq = jnp.stack([grads["q_rope"][:, :, n, key_of[n]] for n in range(N)], 2)
    return o, lse, dq, grads["k_rope"].reshape(k.shape), grads["latent"].reshape(v.shape)


@everywhere
@each("dsa", "sparse")
def test_sparse_attention_and_its_choice(group, impl, dtype):
    case = Case("dsa", group)
    q, k, v, do = (case[name] for name in ("q", "k", "v", "do"))
    T, top_k, U = q.shape[1], int(case["topk"]), case["q_idx"].shape[2]
    if group == "sparse_varlen":
        name, local = "topk_indices_local", case["topk_indices_local"].astype(int)
        document = np.searchsorted(case["cu_seqlens"], np.arange(T), side="right") - 1
        expected = np.where(local >= 0, local + case["cu_seqlens"][document][:, None], -1)
    else:
        name, document, expected = (
            "topk_indices",
            np.zeros(T, int),
            case["topk_indices"].astype(int),
        )
    o, _, *grads = sparse_attention(q, k, v, expected, do, impl, dtype)
    case.check("o", o, limit(dtype, 1e-5, 2e-2))
    for which, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        case.check(which, grad, limit(dtype, 2e-5, 3e-2))
    args = [case["q_idx"], case["k_idx"], case["w_idx"] * np.float32(U**0.5)]
    segment_ids = jnp.asarray(np.tile(document + 1, (len(q), 1)), jnp.int32)
    indices, scores = all_scores([jnp.asarray(a, dtype) for a in args], impl, segment_ids)
    best = indices[..., :top_k]
    if best.shape[-1] < expected.shape[-1]:
        missing = expected.shape[-1] - best.shape[-1]
        best = np.pad(best, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
    check_choice(case, name, best, expected, dtype)
    if "scores" in case:
        case.check("scores", scores, limit(dtype, 1e-5, 2e-2))
    case.done()


# ---- the indexer's loss (jax-linear-attention)


def kl_target(attention, lse, indices, scale, impl):
    """p of `indexer_kl` out of its gradient dI = softmax(I) - p: with one head, unit keys e_s and
    queries of ones, I is the same for every key and the gradient to the query is dI."""
    B, T, S = *lse.shape[:2], attention["k_rope"].shape[1]
    dtype = attention["k_rope"].dtype
    inputs = attention | {
        "q_idx": jnp.ones((B, T, 1, S), dtype),
        "k_idx": jnp.broadcast_to(jnp.eye(S, dtype=dtype), (B, S, S)),
        "w_idx": jnp.ones((B, T, 1), dtype),
        "lse": lse,
    }
    if indices is not None:
        inputs["indices"] = jnp.asarray(indices, jnp.int32)
    grads = testing.output_and_vjp(
        indexer_kl, inputs, wrt=["q_idx"], cotangents=[np.ones((B, T), np.float32)],
        scale=scale, impl=impl,
    )[1]  # fmt: skip
    seen = np.broadcast_to(np.tril(np.ones((T, S))), (B, T, S))
    if indices is not None:
        seen = (np.asarray(indices)[..., :, None] == np.arange(S)).any(2)
    uniform = seen / seen.sum(-1, keepdims=True)
    return uniform - np.asarray(grads["q_idx"][:, :, 0].astype(FLOAT32)) * S**0.5


@everywhere
@each("dsa_indexer_kl", "stages")
def test_indexer_loss(group, impl, dtype):
    """Sparse over the chosen keys, dense over all earlier ones; the main attention's own
    gradients beside it, which the loss leaves alone."""
    case = Case("dsa_indexer_kl", group)
    q, k, v, do = (case[name] for name in ("q", "k", "v", "do"))
    (B, T, N, H), U = q.shape, case["q_idx"].shape[2]
    keys, key_of = grouped(k, N)
    queries = np.zeros((B, T, N, keys.shape[-1]), np.float32)
    for n in range(N):
        queries[:, :, n, key_of[n]] = q[:, :, n]
    main = {
        "q_latent": np.zeros((B, T, N, 1)), "q_rope": queries,
        "latent": np.zeros((B, T, 1)), "k_rope": keys,
    }  # fmt: skip
    main = {name: jnp.asarray(a, dtype) for name, a in main.items()}
    index = {"q_idx": case["q_idx"], "k_idx": case["k_idx"]}
    index["w_idx"] = case["w_idx"] * np.float32(U**0.5)
    index = {name: jnp.asarray(a, dtype) for name, a in index.items()}
    best, scores = all_scores(list(index.values()), impl)
    case.check("scores", scores, limit(dtype, 1e-5, 2e-2))
    chosen = case["sparse/topk_indices"].astype(int)
    check_choice(case, "sparse/topk_indices", best[..., : int(case["topk"])], chosen, dtype)

    for stage in ("sparse", "dense"):
        indices = chosen if stage == "sparse" else None
        if indices is None:
            o, lse, *grads = dense_attention(q, k, v, do, impl, dtype)
        else:
            o, lse, *grads = sparse_attention(q, k, v, indices, do, impl, dtype)
        case.check(f"{stage}/o", o, limit(dtype, 1e-5, 2e-2))
        for which, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            case.check(f"{stage}/{which}", grad, limit(dtype, 2e-5, 3e-2))
        inputs = index | main | {"lse": lse}
        if indices is not None:
            inputs["indices"] = jnp.asarray(indices, jnp.int32)
        (kl,), grads = testing.output_and_vjp(
            indexer_kl, inputs, wrt=list(index), cotangents=[np.ones((B, T), np.float32)],
            scale=H**-0.5, impl=impl,
        )  # fmt: skip
        case.check(f"{stage}/kl_per_query", kl, limit(dtype, 1e-5, 3e-2))
        for name, factor in (("q_idx", 1), ("k_idx", 1), ("w_idx", U**0.5)):
            grad = grads[name].astype(FLOAT32) * factor
            case.check(f"{stage}/d{name}", grad, limit(dtype, 5e-5, 3e-2))
        target = kl_target(main, lse, indices, H**-0.5, impl)
        case.check(f"{stage}/target", target, limit(dtype, 1e-5, 3e-2))
    case.done()


def dense_attention(q, k, v, do, impl, dtype):
    """o, lse, dq, dk, dv of attention to all earlier keys, those of a group repeated."""
    share = q.shape[2] // k.shape[2]
    inputs = {"q": q, "k": np.repeat(k, share, 2), "v": np.repeat(v, share, 2)}
    (out, lse), grads = testing.output_and_vjp(
        mla_attention,
        {name: jnp.asarray(a, dtype) for name, a in inputs.items()},
        cotangents=[do, np.zeros(q.shape[:3], np.float32)],
        scale=q.shape[-1] ** -0.5,
        impl=impl,
    )
    group_sum = lambda a: a.astype(FLOAT32).reshape(*k.shape[:3], share, -1).sum(3)  # noqa: E731
    return out, lse, grads["q"], group_sum(grads["k"]), group_sum(grads["v"])
