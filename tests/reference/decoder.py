"""The decoder once more in float64 NumPy: one document at a time, token by token, expert by expert.

A second opinion that shares no code and no form with moejax: no chunks, no scan, no absorbed
attention, no sorting of tokens by expert, no masks for packing (each document is simply run
alone). Weights are moejax's own arrays, one nested dict a layer (`tests.reference.weights`).
"""

import math

import numpy as np

from moejax.config import MlaConfig, ModelConfig


def sigmoid(x):
    return 0.5 + 0.5 * np.tanh(0.5 * np.asarray(x, np.float64))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * weight


def unit(x):
    return x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6)


def best(values, k):
    """Places of the k largest, the lowest place first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


# ---- KDA


def kda(cfg: ModelConfig, w, x_TD):
    """The token recurrence: decay, erase and write, read."""
    c, T = cfg.kda, len(x_TD)

    def branch(name):
        y_TNH, taps = np.einsum("td,dnh->tnh", x_TD, w[name]), w[name + "_conv"]
        out = np.zeros_like(y_TNH)
        for t in range(T):
            for back in range(min(len(taps), t + 1)):
                out[t] += taps[len(taps) - 1 - back] * y_TNH[t - back]
        return silu(out)

    def through(name):
        return x_TD @ w[name] if name in w else x_TD @ w[name + "_a"] @ w[name + "_b"]

    q, k, v = unit(branch("q")), unit(branch("k")), branch("v")
    z = through("decay").reshape(T, c.num_heads, c.head_dim) + w["dt_bias"]
    rate = np.exp(w["a_log"])[:, None]
    g = (
        c.gate_lower_bound * sigmoid(rate * z)
        if c.gate == "bounded"
        else -rate * np.logaddexp(0, z)
    )
    beta, gate = sigmoid(x_TD @ w["beta"]), through("gate").reshape(v.shape)
    out = np.zeros_like(v)
    for n in range(c.num_heads):
        S = np.zeros((c.head_dim, c.value_head_dim))
        for t in range(T):
            S = np.exp(g[t, n])[:, None] * S
            S = S + beta[t, n] * np.outer(k[t, n], v[t, n] - S.T @ k[t, n])
            out[t, n] = S.T @ q[t, n] / math.sqrt(c.head_dim)
    out = rms(out, w["o_norm"], cfg.norm_eps) * sigmoid(gate)
    return out.reshape(T, -1) @ w["o"]


# ---- MLA and DSA


def yarn(c: MlaConfig):
    """Frequencies, factor on cos and sin, factor on the softmax scale."""
    freq = np.array([c.rope_theta ** (-2 * i / c.rope_dim) for i in range(c.rope_dim // 2)])
    if c.yarn_factor == 1:
        return freq, 1.0, 1.0

    def place(turns):
        return (
            c.rope_dim
            * math.log(c.yarn_original_length / (2 * math.pi * turns))
            / (2 * math.log(c.rope_theta))
        )

    lo, hi = (
        max(math.floor(place(c.yarn_beta_fast)), 0),
        min(math.ceil(place(c.yarn_beta_slow)), c.rope_dim - 1),
    )
    for i in range(len(freq)):
        slow = min(max((i - lo) / max(hi - lo, 1e-3), 0), 1)
        freq[i] = freq[i] * (1 - slow) + freq[i] / c.yarn_factor * slow
    m, m_all = (
        0.1 * s * math.log(c.yarn_factor) + 1 for s in (c.yarn_mscale, c.yarn_mscale_all_dim)
    )
    return freq, m / m_all, m_all**2


def turn(x, c: MlaConfig, pairs):
    """Rotates the pairs of the last dim of x [T, ..., R] as complex numbers."""
    if pairs == "none":
        return x
    half = c.rope_dim // 2
    places = [(2 * i, 2 * i + 1) if pairs == "interleaved" else (i, i + half) for i in range(half)]
    freq, magnitude, _ = yarn(c)
    y = np.zeros_like(x)
    for t in range(len(x)):
        for (a, b), f in zip(places, freq, strict=True):
            z = (x[t, ..., a] + 1j * x[t, ..., b]) * magnitude * np.exp(1j * f * t)
            y[t, ..., a], y[t, ..., b] = z.real, z.imag
    return y


def index_scores(cfg: ModelConfig, w, x_TD, q_latent_TQ):
    c, T = cfg.dsa, len(x_TD)
    q = (q_latent_TQ @ w["q"]).reshape(T, c.num_heads, c.head_dim)
    k = x_TD @ w["k"]
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + c.k_norm_eps)
    k = k * w["k_norm"] + w["k_norm_bias"]
    if c.rope != "none":
        R = cfg.mla.rope_dim
        q[..., :R], k[..., :R] = (
            turn(q[..., :R], cfg.mla, c.rope),
            turn(k[..., :R], cfg.mla, c.rope),
        )
    head_TU = x_TD @ w["weights"] / math.sqrt(c.num_heads * c.head_dim)
    return np.einsum("tu,tus->ts", head_TU, np.maximum(np.einsum("tuh,sh->tus", q, k), 0))


def mla(cfg: ModelConfig, w, x_TD, kind, trace):
    c, T = cfg.mla, len(x_TD)
    source = rms(x_TD @ w["q_a"], w["q_norm"]["weight"], c.latent_eps) if c.q_latent else x_TD
    q = np.einsum("tq,qnh->tnh", source, w["q_b" if c.q_latent else "q"])
    both = x_TD @ w["kv_a"]
    latent = rms(both[:, : c.kv_latent], w["kv_norm"]["weight"], c.latent_eps)
    k, v = np.einsum("tc,cnh->tnh", latent, w["k_b"]), np.einsum("tc,cnh->tnh", latent, w["v_b"])
    q_rope, k_rope = turn(q[..., c.nope_dim :], c, c.rope), turn(both[:, c.kv_latent :], c, c.rope)
    scale = (c.nope_dim + c.rope_dim) ** -0.5 * (1 if c.rope == "none" else yarn(c)[2])
    index = index_scores(cfg, w["indexer"], x_TD, source) if kind == "dsa" else None
    out, kl, picks, top = np.zeros_like(v), 0.0, [], np.full(c.num_heads, -np.inf)
    for t in range(T):
        keys = list(range(t + 1))
        if kind == "dsa" and cfg.dsa.stage != "warmup":
            keys = best(index[t, : t + 1], cfg.dsa.top_k)
        target = np.zeros(len(keys))
        for n in range(c.num_heads):
            logit = scale * (k[keys, n] @ q[t, n, : c.nope_dim] + k_rope[keys] @ q_rope[t, n])
            p = softmax(logit)
            target, top[n] = target + p / c.num_heads, max(top[n], logit.max())
            out[t, n] = p @ v[keys, n]
        if kind == "dsa" and cfg.dsa.stage != "frozen":
            kl += np.sum(target * (np.log(target) - np.log(softmax(index[t, keys]))))
        picks.append(sorted(keys))
    trace.update({"max_logit": top, "picks": picks})
    if kind == "dsa":
        trace["indexer_kl"] = kl
    if c.output_gate != "none":
        out = out * sigmoid(x_TD @ w["gate"]).reshape(T, c.num_heads, -1)
    return out.reshape(T, -1) @ w["o"]


# ---- feed-forward


def activation(cfg: ModelConfig, gate, up):
    f = cfg.ffn
    if f.activation == "swiglu":
        return silu(gate) * up
    bent = f.situ_beta * np.tanh(gate / f.situ_beta) * sigmoid(gate)
    return bent * f.situ_linear_beta * np.tanh(up / f.situ_linear_beta)


def glu(cfg: ModelConfig, gate_up, down, x):
    return activation(cfg, x @ gate_up[:, 0], x @ gate_up[:, 1]) @ down


def route_token(cfg: ModelConfig, logit_E, bias_E):
    """Experts of one token, their weights, and its scores."""
    c = cfg.moe
    score = sigmoid(logit_E) if c.score == "sigmoid" else softmax(logit_E)
    biased, size = score + bias_E, c.num_experts // c.num_groups
    of_group = [sum(sorted(biased[i * size : (i + 1) * size])[-2:]) for i in range(c.num_groups)]
    open_experts = [
        e for g in sorted(best(of_group, c.top_groups)) for e in range(g * size, (g + 1) * size)
    ]
    chosen = [open_experts[i] for i in best(biased[open_experts], c.top_k)]
    p = (biased if c.weights_use_bias else score)[chosen]
    return chosen, c.route_scale * (p / (p.sum() + 1e-20) if c.renormalize else p), score


def moe(cfg: ModelConfig, w, x_TD, trace):
    c = cfg.moe
    logits, ids = x_TD @ w["router"]["weight"], []
    latent = x_TD @ w["latent_down"] if c.latent_dim else x_TD
    out = np.zeros_like(latent)
    for t in range(len(x_TD)):
        chosen, p, _ = route_token(cfg, logits[t], w["router"]["bias"])
        for e, weight in zip(chosen, p, strict=True):
            out[t] += weight * glu(
                cfg, w["experts"]["gate_up"][e], w["experts"]["down"][e], latent[t]
            )
        ids.append(chosen)
    trace["ids"] = np.array(ids)
    trace["load"] = np.bincount(trace["ids"].ravel(), minlength=c.num_experts)
    if c.latent_dim:
        out = rms(out, w["latent_norm"]["weight"], cfg.norm_eps) if c.latent_norm else out
        out = out @ w["latent_up"]
    return (
        out + glu(cfg, w["shared"]["gate_up"], w["shared"]["down"], x_TD) if c.num_shared else out
    )


# ---- the whole


def mix(cfg: ModelConfig, w, sources):
    """Attention over depth of every token."""
    out = np.zeros_like(sources[0])
    for t in range(len(out)):
        rows = np.stack([s[t] for s in sources])
        out[t] = softmax(rms(rows, w["norm"], cfg.norm_eps) @ w["query"]) @ rows
    return out


def forward(cfg: ModelConfig, w: dict, tokens_T) -> tuple[np.ndarray, list[dict]]:
    """Logits [T, V] of one document, and what each layer chose and measured."""
    stream, bank, traces = w["embed"][np.asarray(tokens_T)], [], []

    def read(layer, name):
        return mix(cfg, layer[name], [*bank, stream]) if bank else stream

    for i, (kind, ffn) in enumerate(zip(cfg.attention_kinds(), cfg.ffn_kinds(), strict=True)):
        layer, trace = w["layers"][i], {}
        x = rms(read(layer, "attn_mix"), layer["attn_norm"]["weight"], cfg.norm_eps)
        if cfg.attn_res_block and i % cfg.attn_res_block == 0:
            bank, stream = [*bank, stream], np.zeros_like(stream)
        stream = stream + (
            kda(cfg, layer["attn"], x) if kind == "kda" else mla(cfg, layer["attn"], x, kind, trace)
        )
        x = rms(read(layer, "ffn_mix"), layer["ffn_norm"]["weight"], cfg.norm_eps)
        if ffn == "dense":
            stream = stream + glu(cfg, layer["ffn"]["gate_up"], layer["ffn"]["down"], x)
        else:
            stream = stream + moe(cfg, layer["ffn"], x, trace)
        traces.append({**trace, "sources": len(bank) + 1, "out": stream})
    x = rms(read(w, "final_mix"), w["final_norm"], cfg.norm_eps)
    return x @ w["head"].T, traces


def cross_entropy(logits_TV, labels_T) -> float:
    """Sum over the labels that count; labels_t belongs to logits_t."""
    return float(
        sum(
            np.logaddexp.reduce(row) - row[y]
            for row, y in zip(logits_TV, labels_T, strict=True)
            if y >= 0
        )
    )
