"""Every implementation against the numbers of other packages: each array of each fixture, in
float32 and bfloat16, outputs and gradients.

In bfloat16 the activations and the upstream gradient are rounded to it; log decays, states, taps,
norm weights and everything that a model keeps in float32 stay. A first limit is for float32, a
second for bfloat16.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import testing
from pallas_kernels.attn_res import attn_res
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.kda import gates, kda, kda_fused
from pallas_kernels.linear_xent import linear_xent
from pallas_kernels.short_conv import short_conv
from tests.kernels.oracles import (
    BFLOAT16,
    FLOAT32,
    Case,
    each,
    error,
    everywhere,
    limit,
    quick,
    uncovered,
)


def test_every_array_has_a_test():
    """Each test below reads its whole group, so groups are all there is to count."""
    assert uncovered() == {}


# ---- Kimi Delta Attention (fla-core)

RECURRENCE = ("q", "k", "v", "g", "beta", "initial_state")
FUSED = ("q", "k", "v", "gate_logits", "beta_logits", "A_log", "dt_bias")
_OURS = {"g": "log_decay", "gate_logits": "gate", "A_log": "a_log"}
_WIDE = ("g", "initial_state", "A_log", "dt_bias")  # float32 whatever the activations are


def check_kda(case, names, fn, dtype, limits, view=lambda name: None, **options):
    """`view` gives arrays of the case in another form; `limits` are of values and of gradients."""
    array = lambda name: case[name] if view(name) is None else view(name)  # noqa: E731
    inputs = {
        _OURS.get(n, n): jnp.asarray(array(n), FLOAT32 if n in _WIDE else dtype) for n in names
    }
    final = np.zeros_like(array("final_state"))
    cotangents = [array("do"), array("dfinal_state") if "dfinal_state" in case else final]
    (out, state), grads = testing.output_and_vjp(fn, inputs, cotangents=cotangents, **options)
    assert out.dtype == dtype and state.dtype == FLOAT32
    # Where all decays are exp(-20) these two are 1e-9: an absolute bound.
    tiny = ("dg", "dinitial_state") if case.group == "T33_all_minus20" else ()
    for name, value in {"o": out, "final_state": state}.items():
        case.check(name, value, limits[0], expected=view(name))
    for name in names:
        grad = grads[_OURS.get(name, name)]
        floor, most = 1e-3, limits[1]
        if "d" + name in tiny:
            floor, most = 1.0, limit(dtype, 1e-6, 1e-4)
        expected = view("d" + name)
        if expected is None:
            expected = case["d" + name].reshape(grad.shape)
        case.check("d" + name, grad, most, floor=floor, expected=expected)


@everywhere
@each("kda", "recurrence")
def test_kda(group, impl, dtype):
    hard = group.endswith(("extreme", "lower_bound"))
    limits = {
        (FLOAT32, False): (1e-5, 2e-5), (FLOAT32, True): (2e-5, 1e-4),
        (BFLOAT16, False): (2e-2, 3e-2), (BFLOAT16, True): (2e-2, 4e-2),
    }  # fmt: skip
    case = Case("kda", group)
    check_kda(case, RECURRENCE, kda, dtype, limits[dtype, hard], impl=impl)
    case.done()


@everywhere
@each("kda", "fused")
def test_kda_with_its_gates(group, impl, dtype):
    """The bound is a function of its own, lb sigmoid(a (f + bias)), as released; no clamp."""
    case = Case("kda", group)
    heads = case["gate_logits"].shape[2:]
    bound = float(case["lower_bound"]) if "lower_bound" in case else None
    view = lambda n: case[n].reshape(heads) if n == "dt_bias" else None  # noqa: E731
    limits = limit(dtype, (1e-5, 2e-5), (2e-2, 3e-2))
    check_kda(case, FUSED, kda_fused, dtype, limits, view, impl=impl, lower_bound=bound)
    gate = jnp.asarray(case["gate_logits"], dtype)
    g = gates.log_decay(gate, jnp.asarray(case["A_log"]), jnp.asarray(view("dt_bias")), bound)
    assert g.dtype == FLOAT32
    case.check("g", g, limit(dtype, 1e-6, 2e-2))
    case.done()


@everywhere
@each("kda", "packed")
def test_kda_of_packed_rows(group, impl, dtype):
    """Each document has an initial state there; here each is a row, filled up with positions that
    neither write nor decay, so that the last state is the document's."""
    case = Case("kda", group)
    borders = case["cu_seqlens"]
    lengths = np.diff(borders)

    def rows(name):
        array = case[name]
        if array.shape[0] == len(lengths):
            return None
        filled = np.zeros((len(lengths), lengths.max(), *array.shape[2:]), array.dtype)
        for row, (start, length) in enumerate(zip(borders, lengths, strict=False)):
            filled[row, :length] = array[0, start : start + length]
        return filled

    def own_rows_only(*args, **options):
        """Gradients at the filling are of positions that the fixture does not have."""
        real = jnp.arange(lengths.max()) < lengths[:, None]
        keep = lambda a: jnp.where(real.reshape(*real.shape, *(1,) * (a.ndim - 2)), a, 0)  # noqa: E731
        q, k, v, log_decay, beta = map(keep, args)
        return kda(q, k, v, log_decay, beta, **options)

    def fn(q, k, v, log_decay, beta, initial_state, impl):
        return own_rows_only(q, k, v, log_decay, beta, initial_state=initial_state, impl=impl)

    check_kda(
        case, RECURRENCE, fn, dtype, limit(dtype, (1e-5, 2e-5), (2e-2, 3e-2)), rows, impl=impl
    )
    case.done()


# ---- attention over depth (fla-core)


@everywhere
@each("attnres", "mix")
def test_attn_res(group, impl, dtype):
    case = Case("attnres", group)
    eps, normed = float(case["eps"]), "output_rms_weight" in case
    weights = {"query": case["query"], "rms_weight": case["rms_weight"]}
    if normed:
        weights["output_rms_weight"] = case["output_rms_weight"]

    def fn(residuals, query, rms_weight, output_rms_weight=None):
        mix = attn_res(query, rms_weight, residuals, eps=eps, impl=impl).astype(FLOAT32)
        if output_rms_weight is None:
            return mix
        return mix * jax.lax.rsqrt(jnp.mean(mix**2, -1, keepdims=True) + eps) * output_rms_weight

    inputs = {"residuals": jnp.asarray(case["residuals"], dtype), **weights}
    (out,), grads = testing.output_and_vjp(fn, inputs, cotangents=[case["do"]])
    case.check("o", out, limit(dtype, 1e-5, 1e-2))
    for name, grad in grads.items():
        case.check("d" + name, grad, limit(dtype, 2e-5, 2e-2))
    # A weight close to 1/2 moves by 1.1e-2 when the sources are rounded and nothing else is done.
    allowed = limit(
        dtype, 1e-5, 1e-2 + error(exact_depth_weights(case, eps, dtype), case.peek("probs"))
    )
    case.check("probs", depth_weights(case, eps, impl, dtype), allowed)
    case.done()


def rounded(array, dtype):
    """The array as `dtype` holds it, in float64."""
    return np.asarray(jnp.asarray(array, dtype).astype(FLOAT32), np.float64)


def exact_depth_weights(case, eps, dtype):
    sources = rounded(case["residuals"], dtype)
    keys = sources / np.sqrt(np.mean(sources**2, -1, keepdims=True) + eps)
    shares = np.exp(keys @ (case["query"] * case["rms_weight"]).astype(np.float64))
    return shares / shares.sum(0)


def depth_weights(case, eps, impl, dtype):
    """The softmax weights through the op itself: L more channels, the m-th marking source m.

    The marks and the longer mean change rms^2 by D / (D + L) when eps is chosen so; the query takes
    the root of that back.
    """
    residuals = case["residuals"]
    L, B, T, D = residuals.shape
    mark = 2.0 ** np.floor(np.log2((D * eps / 2) ** 0.5))
    marks = np.broadcast_to((mark * np.eye(L))[:, None, None], (L, B, T, L))
    sources = jnp.asarray(np.concatenate([residuals, marks], -1), dtype)
    shrink = D / (D + L)
    query = np.concatenate([case["query"] * shrink**0.5, np.zeros(L, np.float32)])
    weight = np.concatenate([case["rms_weight"], np.zeros(L, np.float32)])
    mix = quick(attn_res, static_argnames=("eps", "impl"))(
        query, weight, sources, eps=shrink * eps - mark**2 / (D + L), impl=impl
    )
    return jnp.moveaxis(mix[..., D:].astype(FLOAT32) / mark, -1, 0)


# ---- cross entropy (torch)

VARIANTS = {
    "sum": {}, "mean": {}, "label_smoothing_0.1": {"label_smoothing": 0.1},
    "zloss_1e-3_mean": {"z_loss": 1e-3}, "softcap_15_mean": {"soft_cap": 15.0},
}  # fmt: skip


@everywhere
@each("cross_entropy", "losses")
def test_linear_xent(group, impl, dtype):
    """Row 0 has logits of several hundred, so its own logits are what rounding moves."""
    case = Case("cross_entropy", group)
    labels = jnp.asarray(case["labels"])
    x, weight = (jnp.asarray(case[name], dtype) for name in ("x", "W"))
    work = {"rows_per_chunk": 16, "vocab_per_chunk": 100, "impl": impl}
    assert {name.split("/")[0] for name in case.below("") if "/" in name} == set(VARIANTS)

    @quick
    def everything(x, weight):
        results = {}
        for name, options in VARIANTS.items():
            fn = lambda x, weight, o=options: linear_xent(x, weight, labels, **work, **o)  # noqa: E731
            grad = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)
            results[name] = grad(x, weight)
        one = lambda x, label: linear_xent(x[None], weight, label[None], **work)[0]  # noqa: E731
        per_row = [jax.vmap(one)(x, rows) for rows in (labels, jnp.zeros_like(labels))]
        return results, *per_row

    results, nll, nll_of_0 = everything(x, weight)
    for name, ((loss, count), (dx, dw)) in results.items():
        assert int(count) == int((labels != -100).sum())
        share = 1 if name == "sum" else int(count)
        expected = float(case[f"{name}/loss"])
        allowed = 1e-6 * expected
        if dtype == BFLOAT16:
            inputs = [rounded(case[array], dtype) for array in ("x", "W")]
            moved = exact_loss(*inputs, case, name)
            allowed = 3e-3 * int(count) / share + abs(moved - expected)
        assert abs(float(loss) / share - expected) <= allowed, name
        for which, grad in (("dx", dx), ("dW", dw)):
            case.check(f"{name}/{which}", grad.astype(FLOAT32) / share, limit(dtype, 1e-5, 2e-2))
    case.check("nll_per_token_0_where_ignored", nll, limit(dtype, 2e-6, 2e-2))
    logit_of_0 = x.astype(FLOAT32) @ weight[0].astype(FLOAT32)
    case.check("lse_per_token", nll_of_0 + logit_of_0, limit(dtype, 2e-6, 2e-2))
    case.done()


def exact_loss(x, weight, case, variant):
    """The loss in float64: what rounding x and weight does to it is no implementation's doing. A
    logit of several hundred moves by 0.08 with them."""
    options = VARIANTS[variant]
    valid = case["labels"] != -100
    logits, cap = x[valid] @ weight.T, options.get("soft_cap")
    if cap:
        logits = cap * np.tanh(logits / cap)
    lse = np.logaddexp.reduce(logits, -1)
    target = logits[np.arange(len(logits)), case["labels"][valid]]
    smooth = options.get("label_smoothing", 0.0)
    losses = lse - (1 - smooth) * target - smooth * logits.mean(-1)
    losses += options.get("z_loss", 0.0) * lse**2
    return losses.sum() if variant == "sum" else losses.mean()


@everywhere
@each("cross_entropy", "nothing")
def test_linear_xent_without_labels(group, impl, dtype):
    """torch's mean over no label is nan; the sum, which is what the op gives, is 0."""
    case = Case("cross_entropy", group)
    x, weight = (jnp.asarray(case[name], dtype) for name in ("x", "W"))
    loss, count = linear_xent(x, weight, jnp.asarray(case["labels"]), impl=impl)
    assert float(loss) == float(case["sum_loss"]) == 0 and int(count) == 0
    case.done()


# ---- short convolution (torch) and SiTU (mlx-lm)


@everywhere
@each("short_conv", "conv")
def test_short_conv(group, impl, dtype):
    case = Case("short_conv", group)
    along_t = lambda name: case[name].swapaxes(1, 2)  # noqa: E731
    most = limit(dtype, 2e-6, 1e-2)
    inputs = {"x": jnp.asarray(along_t("x_bct"), dtype), "taps": jnp.asarray(case["w_ck"].T)}
    state = jnp.asarray(along_t("state"), dtype)
    for suffix, given in {"": inputs, "_with_state": inputs | {"initial_state": state}}.items():
        (y, final), grads = testing.output_and_vjp(
            short_conv, given, cotangents=[along_t("do"), np.zeros(state.shape)], impl=impl
        )
        case.check("y" + suffix, y.swapaxes(1, 2), most)
        case.check("dx" + suffix, grads["x"].swapaxes(1, 2), most)
        case.check("dw" + suffix, grads["taps"].T, most)
        assert y.dtype == dtype and grads["taps"].dtype == FLOAT32
    case.check("final_state", final.swapaxes(1, 2), most)
    case.check("dstate", grads["initial_state"].swapaxes(1, 2), most)
    case.done()


@everywhere
@each("situ", "situ")
def test_situ_inside_grouped_matmul(group, impl, dtype):
    """A unit matrix as weight hands gate and up through the matmul as they are."""
    case = Case("situ", group)
    betas = float(case["beta"]), float(case["linear_beta_or_0"]) or None
    num_rows, inner = case["gate"].shape
    weights = jnp.broadcast_to(jnp.eye(2 * inner, dtype=dtype), (2, 2 * inner, 2 * inner))
    (out,), grads = testing.output_and_vjp(
        lambda rows: grouped_matmul(
            rows, weights, jnp.array([2, num_rows - 2]), activation="situ", situ_betas=betas,
            impl=impl,
        ),
        {"rows": jnp.asarray(np.concatenate([case["gate"], case["up"]], -1), dtype)},
        cotangents=[case["do"]],
    )  # fmt: skip
    gate, up = jnp.split(grads["rows"], 2, -1)
    for name, actual in (("y", out), ("dgate", gate), ("dup", up)):
        case.check(name, actual, limit(dtype, 2e-6, 1e-2))
    case.done()
