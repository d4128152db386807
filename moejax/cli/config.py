"""`moejax config`: the resolved config, what the model counts, and where every array would lie."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from moejax.cli.flags import Parser, add_config, positive, required_config
from moejax.cli.tables import Column, print_table, say
from moejax.config import MESH_AXES, RunConfig, SourceConfig, as_dict, flat_names
from moejax.config.load import field_comments, section_names

EXAMPLES = (
    "moejax config --config=tiny",
    "moejax config --config=kimi_k3 --devices=128 --sharding",
    "moejax config --config=tiny --params --config.model.num_layers=13",
    "moejax config --config=kimi_k31_lora --devices=128 --memory",
    "moejax config --fields                       every field, its meaning, default and range",
)


def main(argv: Sequence[str]) -> int:
    """Prints what was selected, or everything. Allocates nothing and needs no device."""
    options, overrides = _parser().parse(argv)
    everything = not (options.fields or options.params or options.sharding or options.memory)
    if options.fields and not options.config:
        options.config = "base"
    cfg = required_config(options, overrides)
    if options.fields and not (
        options.params or options.sharding or options.memory or options.json
    ):
        print_fields(cfg)
        return 0
    count = options.devices or smallest_fit(cfg)
    sizes = cfg.check(count)
    # Shapes are all that is asked for: no accelerator is taken from whoever uses it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.memory:
        return print_memory(cfg, sizes, as_json=options.json)
    facts = model_facts(cfg, sizes)
    if options.json:
        print(json.dumps({"config": as_dict(cfg), "mesh": sizes, **facts}, indent=2))
        return 0
    if everything or options.fields:
        print_fields(cfg)
    if everything or options.params:
        print_counts(facts)
    if everything or options.sharding:
        by_hand = "" if options.devices else "; --devices=N shows it for another number"
        print_sharding(facts, sizes, by_hand)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "config",
        what="Prints the resolved config with the meaning of every field, the parameters by part, "
        "and the sharding table: name, shape, dtype, spec and bytes a device of every array. "
        "Computed from shapes alone, so it takes seconds for any size. "
        "`moejax config --fields` lists all fields.",
        examples=EXAMPLES,
    )
    add_config(parser)
    parser.add_argument("--fields", action="store_true", help="only the fields")
    parser.add_argument("--params", action="store_true", help="only the parameter counts")
    parser.add_argument("--sharding", action="store_true", help="only the sharding table")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="only what the layers' results weigh until the backward pass, by name, and what "
        "train.remat and swap do with each",
    )
    parser.add_argument(
        "--devices", type=positive, metavar="N",
        help="devices of the mesh; none are needed (default: the fewest that the mesh fits)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    return parser


def smallest_fit(cfg: RunConfig) -> int:
    """The fewest devices the mesh fits: an axis at -1 counts as 1, or what of it crosses hosts."""
    return math.prod(
        getattr(cfg.mesh.dcn, axis) if getattr(cfg.mesh, axis) == -1 else getattr(cfg.mesh, axis)
        for axis in MESH_AXES
    )


def print_memory(cfg: RunConfig, sizes: dict[str, int], *, as_json: bool) -> int:
    """The results of the layers, by name. Returns 0."""
    from moejax.cli.memory_table import print_plan
    from moejax.train.memory_plan import plan_of_shapes

    plan, tokens = plan_of_shapes(cfg, sizes)
    if as_json:
        print(json.dumps({"tokens": tokens, **dataclasses.asdict(plan)}, indent=2))
    else:
        print_plan(plan, tokens, timed=cfg.train.remat == "auto")
    return 0


def model_facts(cfg: RunConfig, sizes: dict[str, int]) -> dict[str, Any]:
    """Counts and sharding table: {"parameters": ..., "sharding": [...]}, ready for JSON."""
    import jax

    from moejax.lora import adapted_parts
    from moejax.models.parts import (
        count_by_part,
        count_total_and_active,
        flat_infos,
        num_values,
    )
    from moejax.partitioning import stored_spec
    from moejax.train.trainable import stored_params, trainable_mask

    parts, _ = adapted_parts(cfg)
    mask = trainable_mask(cfg.train, parts.infos)
    params = jax.tree.leaves(stored_params(cfg.train, parts.params, parts.infos, mask))
    infos = flat_infos(parts.infos)
    trained = sum(
        num_values(info, leaf)
        for info, leaf, trains in zip(infos, params, jax.tree.leaves(mask), strict=True)
        if trains
    )
    total, active = count_total_and_active(parts)
    if all(jax.tree.leaves(mask)):
        trained = total  # the balancing state, which no gradient moves, among them
    arrays = [
        _array(info.name, leaf, stored_spec(info, leaf.shape, sizes), sizes)
        for info, leaf in zip(infos, params, strict=True)
    ]
    # Balancing state lies whole on every device.
    arrays += [
        _array(jax.tree_util.keystr(path, simple=True, separator="."), leaf, (), sizes)
        for path, leaf in jax.tree_util.tree_leaves_with_path(parts.balance)
    ]
    by_part = dict(sorted(count_by_part(parts).items(), key=lambda item: -item[1]))
    return {
        "parameters": {"by_part": by_part, "total": total, "active": active, "trained": trained},
        "sharding": arrays,
        "bytes_a_device": sum(array["bytes_a_device"] for array in arrays),
    }


def _array(name: str, leaf: Any, spec: Iterable[Any], sizes: dict[str, int]) -> dict[str, Any]:
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    ways = math.prod(sizes[axis] for entry in axes for axis in entry)
    return {
        "name": name,
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": [list(entry) for entry in axes],
        "bytes_a_device": math.prod(leaf.shape) * leaf.dtype.itemsize // ways,
    }


def print_fields(cfg: RunConfig) -> None:
    """Every field as it is written on the command line, with its comment; * = not the default."""
    comments, defaults, values = field_comments(), flat_names(RunConfig()), flat_names(cfg)
    for section in ["", *section_names(cfg)]:
        names = [name for name in values if name.rpartition(".")[0] == section]
        say(section or "run", bold=True)
        rows = [
            [
                "*" if values[n] != defaults[n] else "",
                f"{n}={_text(values[n])}",
                comments.get(n, ""),
            ]
            for n in names
        ]
        print_table([Column(), Column(), Column(dim=True)], rows)
        say("")
    say("* differs from the default. Change a field with --config.FIELD=VALUE.\n")


def _text(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], dict):
        usual = as_dict(SourceConfig())
        return repr(tuple({k: v for k, v in one.items() if v != usual[k]} for one in value))
    return value if isinstance(value, str) and value else repr(value)


def print_counts(facts: dict[str, Any]) -> None:
    """Parameters by part, largest first, then all and those a token uses."""
    counts = facts["parameters"]
    say("parameters", bold=True)
    rows = [
        [part, f"{n:,}", f"{100 * n / counts['total']:.2f} %"]
        for part, n in counts["by_part"].items()
    ]
    rows.append(["total", f"{counts['total']:,}", ""])
    rows.append(["active", f"{counts['active']:,}", "without input embedding and idle experts"])
    if counts["trained"] < counts["total"]:
        rows.append(["trained", f"{counts['trained']:,}", "the others stay as they are"])
    print_table([Column(), Column(right=True), Column(right=False, dim=True)], rows)
    say("")


def print_sharding(facts: dict[str, Any], sizes: dict[str, int], hint: str) -> None:
    """Where every array lies between steps, and what one device holds of it."""
    mesh = " x ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"
    say(f"sharding on {mesh} ({math.prod(sizes.values())} devices{hint})", bold=True)
    header = ["name", "shape", "dtype", "spec", "bytes a device"]
    rows = [
        [a["name"], _shape(a["shape"]), a["dtype"], _spec(a["spec"], sizes), _bytes(a)]
        for a in facts["sharding"]
    ]
    rows.append(["all weights", "", "", "", _bytes(facts)])
    columns = [Column(), Column(), Column(), Column(), Column(right=True)]
    print_table(columns, rows, header)


def _bytes(entry: dict[str, Any]) -> str:
    return f"{entry['bytes_a_device']:,}"


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _spec(spec: list[list[str]], sizes: dict[str, int]) -> str:
    """P(...) as far as it splits anything: `P(-, expert, fsdp)`, without axes of size 1."""
    shown = ["*".join(axis for axis in entry if sizes[axis] > 1) or "-" for entry in spec]
    while shown and shown[-1] == "-":
        shown.pop()
    return f"P({', '.join(shown)})"
