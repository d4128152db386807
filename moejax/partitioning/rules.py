"""Logical axis names to mesh axes: one table for what is stored, one for what is computed.

FSDP is no wrapper here: it is STORED differing from COMPUTE. A layer asks for a weight in its
COMPUTE layout and the compiler gathers it; the gradient comes back scattered. Dense weights spread
over ``fsdp`` and ``expert``. Expert weights spend ``expert`` on the experts themselves, and
``fsdp`` too where it divides them: whole experts are gathered in front of each other, while a
gather of widths would first have to turn every layer's weights around. Where it does not divide
them, the width (``expert_embed``) takes ``fsdp``.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import PartitionSpec as P

MeshAxes = str | tuple[str, ...] | None
Rules = Mapping[str, MeshAxes]

BATCH_AXES = ("data", "fsdp", "expert")

STORED: Rules = {
    "embed": ("fsdp", "expert"),
    "latent": ("fsdp", "expert"),
    "vocab": "tensor",
    "ffn": "tensor",
    "heads": "tensor",
    "experts": ("expert", "fsdp"),
    "expert_embed": None,
    "router": None,
    "layers": "stage",
}
# Added to STORED where no other dim has taken the axis.
SPILLED = {"expert_embed": "fsdp"}
COMPUTE: Rules = {
    "batch": BATCH_AXES,
    "seq": "context",
    "embed": None,
    "latent": None,
    "vocab": "tensor",
    "ffn": "tensor",
    "heads": "tensor",
    "experts": "expert",
    "expert_embed": None,
    "router": None,
    "layers": None,
}


def spec_for(axes: tuple[str | None, ...], rules: Rules) -> P:
    """PartitionSpec of the logical `axes` under a table.

    Raises:
      ValueError: a name the table does not know, or one mesh axis put on two dims.
    """
    unknown = [a for a in axes if a is not None and a not in rules]
    if unknown:
        raise ValueError(f"no rule for logical axes {unknown}; known are {sorted(rules)}")
    entries = [None if a is None else rules[a] for a in axes]
    used = [m for e in entries if e is not None for m in ((e,) if isinstance(e, str) else e)]
    if len(set(used)) != len(used):
        raise ValueError(
            f"{axes} would put one mesh axis on two dims: {entries}. Give one of them its own name."
        )
    return P(*entries)


def fit_spec(spec: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    """`spec` without the mesh axes that do not divide their dim, so that every shard has one size.

    Axes are kept from the left as long as their product divides: a width of 12 over
    fsdp=4 x expert=8 keeps fsdp.
    """
    fitted: list[MeshAxes] = []
    for dim, entry in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec)), strict=True):
        kept: list[str] = []
        ways = 1
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            ways *= sizes.get(axis, 1)
            if dim % ways:
                break
            kept.append(axis)
        fitted.append(tuple(kept) if len(kept) > 1 else kept[0] if kept else None)
    return P(*fitted)


def stored_layout(
    axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> P:
    """Where a value with these logical axes is stored: STORED as it fits, then SPILLED."""
    spec = list(fit_spec(spec_for(axes, STORED), shape, sizes))
    taken = {m for e in spec if e is not None for m in ((e,) if isinstance(e, str) else e)}
    for dim, axis in enumerate(axes):
        spill = SPILLED.get(axis) if axis else None
        if spill and spill not in taken and shape[dim] % sizes.get(spill, 1) == 0:
            spec[dim] = spill
            taken.add(spill)
    return P(*spec)
