"""A parameter tree with the shapes and stored layouts of a small model, for optimizer tests."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.partitioning import ParamInfo, shardings_for

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")


def _entry(name, shape, axes, matrix=None, head_axis=None):
    return name, shape, ParamInfo(name, axes, len(shape) - len(axes), matrix, head_axis)


def _block(kind, stack, *, D=32, N=4, H=8, E=8, L=16, F=16):
    n = lambda part: f"{kind}.{part}"  # noqa: E731
    heads = [
        _entry(n(k), (*stack, D, N, H), ("embed", "heads", None), (-3, -1), -2)
        for k in ("q_proj", "k_proj", "v_proj")
    ]
    flat = [
        _entry(n("o_proj"), (*stack, N * H, D), (None, "embed"), (-2, -1)),
        _entry(n("router"), (*stack, D, E), ("embed", None), (-2, -1)),
        _entry(n("down"), (*stack, D, L), ("embed", None), (-2, -1)),
        _entry(n("up"), (*stack, L, D), (None, "embed"), (-2, -1)),
        _entry(n("b_proj"), (*stack, D, N), ("embed", None)),
        _entry(n("q_conv"), (*stack, N * H, 4), (None, None)),
        _entry(n("a_log"), (*stack, N), (None,)),
        _entry(n("norm"), (*stack, D), (None,)),
    ]
    experts = [
        _entry(
            n("gate_up"),
            (*stack, E, L, 2, F),
            ("experts", "expert_embed", None, "ffn"),
            (-3, -1),
        ),
        _entry(
            n("expert_down"),
            (*stack, E, F, L),
            ("experts", "ffn", "expert_embed"),
            (-2, -1),
        ),
    ]
    return heads + flat + experts


ENTRIES = [
    *_block("kda", (2, 3)),
    *_block("mla", (2, 1)),
    *_block("dense", (1,)),
    _entry("embed", (64, 32), ("vocab", "embed")),
    _entry("final_norm", (32,), (None,)),
]


def nested(values):
    """Nested dict of `values`, one for each entry, by dotted name."""
    tree = {}
    for (name, *_), value in zip(ENTRIES, values, strict=True):
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def infos():
    return nested([info for *_, info in ENTRIES])


def shardings(mesh):
    return shardings_for(infos(), random(0), mesh)


def random(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return nested(
        [jnp.asarray(scale * rng.standard_normal(shape), jnp.float32) for _, shape, *_ in ENTRIES]
    )


def make_mesh(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
