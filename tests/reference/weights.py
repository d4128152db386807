"""moejax's parameter trees as one nested dict of float64 arrays a layer, and back."""

import numpy as np

from moejax.models.parts import ModelParts


def _place(parts: ModelParts):
    """(stack, run, repeat, count) of every layer, in order."""
    for s, segment in enumerate(parts.segments):
        for repeat in range(segment.repeats):
            for r, run in enumerate(segment.runs):
                for count in range(run.count):
                    yield f"stack{s}", f"run{r}", repeat, count


def _map(fn, tree):
    return {k: _map(fn, v) for k, v in tree.items()} if isinstance(tree, dict) else fn(tree)


def _merge(a: dict, b: dict) -> dict:
    return {k: _merge(a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in {**a, **b}}


def by_layers(parts: ModelParts, params: dict, balance: dict) -> dict:
    """The weights as the reference decoder reads them; router biases beside router weights."""
    both = _map(lambda a: np.asarray(a, np.float64), _merge(params, balance))
    out = {"embed": both["embed"]["table"], "final_norm": both["final_norm"]["weight"]}
    out["head"] = out["embed"] if parts.cfg.tie_embeddings else both["head"]["table"]
    if parts.cfg.attn_res_block:
        out["final_mix"] = both["final_mix"]
    out["layers"] = [_map(lambda a, at=(i, c): a[at], both[s][r]) for s, r, i, c in _place(parts)]
    return out


def stacked(parts: ModelParts, weights: dict) -> tuple[dict, dict]:
    """The inverse of :func:`by_layers`: (params, balance) in float32; KeyError if one lacks."""
    rest = {
        "embed": {"table": weights["embed"]},
        "head": {"table": weights["head"]},
        "final_norm": {"weight": weights["final_norm"]},
        "final_mix": weights.get("final_mix"),
    }
    places = list(_place(parts))

    def fill(abstract, path=()):
        if isinstance(abstract, dict):
            return {k: fill(v, (*path, k)) for k, v in abstract.items()}
        out = np.zeros(abstract.shape, np.float32)
        if not path[0].startswith("stack"):
            out[...] = _get(rest, path)
            return out
        for (s, r, i, c), layer in zip(places, weights["layers"], strict=True):
            if (s, r) == path[:2]:
                value = _get(layer, path[2:])
                assert value.shape == out.shape[2:], (path, value.shape, out.shape)
                out[i, c] = value
        return out

    return fill(parts.params), fill(parts.balance)


def _get(tree, path):
    for key in path:
        tree = tree[key]
    return np.asarray(tree)
