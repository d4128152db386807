"""`moejax replay`: the batch of a bad step once more, with a line for each gradient that is bad."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moejax.cli.flags import Parser, add_config, add_devices, is_first_process, start_devices
from moejax.config import ConfigError
from moejax.config.load import RESOLVED_FILE, load_config

if TYPE_CHECKING:
    from moejax.train.replay import Replayed

EXAMPLES = (
    "moejax replay --workdir=runs/tiny --devices=8",
    "moejax replay --workdir=runs/tiny --batch=step-00000123 --config.train.compute_dtype=float32",
)
BAD_AGAIN = 3
_SHOWN = 20


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 where the batch is good at the state it is replayed at, 3 where it is bad."""
    parser = Parser(
        "replay",
        what="Computes loss and gradients of a batch that a run kept because its step was bad "
        "(train.bad_step), at the newest checkpoint before that step, and tells which tensor is "
        "the first that is not finite. Writes nothing. To replay it at the very state, train a "
        "copy of the run to the step before (--config.train.stop_at). Exit code 3: bad again.",
        examples=EXAMPLES,
    )
    parser.add_argument("--workdir", metavar="DIR", help="the run")
    parser.add_argument(
        "--batch", default="", metavar="NAME",
        help="of the folder in WORKDIR/bad_steps, or how it begins (default: the newest)",
    )  # fmt: skip
    add_config(parser, "a config instead of the run's own")
    add_devices(parser)
    options, overrides = parser.parse(argv)
    if not options.workdir:
        raise ConfigError("--workdir is needed: the run whose batch is to be replayed.")
    workdir = pathlib.Path(options.workdir)
    cfg = load_config(options.config or str(workdir / RESOLVED_FILE), overrides)
    cfg.check(start_devices(options))

    from moejax.train.compile import enable_cache
    from moejax.train.replay import choose_batch, replay

    enable_cache(cfg.compile_cache)
    folder = choose_batch(workdir, options.batch)
    first = is_first_process()
    done = replay(cfg, workdir, folder, print if first else lambda line: None)
    if first:
        print("\n".join([f"batch {folder}", *lines(done)]))
    return BAD_AGAIN if done.bad else 0


def lines(done: Replayed) -> list[str]:
    """What is printed: then and now, the first bad tensor, and the gradients that stand out."""
    report = done.report
    out = [
        f"step {report['step']} then: loss {report['loss']}, gradient norm {report['grad_norm']}, "
        f"limit of the loss {report['limit']}",
        f"now, at the state after step {done.state_step}: loss {done.loss:.6g}, gradient norm "
        f"{done.grad_norm:.6g}: {'bad' if done.bad else 'good'}",
    ]
    if done.first_bad:
        out.append(f"first bad tensor: {done.first_bad}")
    bad = [leaf for leaf in done.leaves if leaf.nan or leaf.inf]
    shown = bad or sorted(done.leaves, key=lambda leaf: -leaf.largest)
    what = f"{len(bad)} of {len(done.leaves)} gradients are not finite" if bad else "largest"
    out.append(f"{what}:")
    out += [
        f"  {leaf.name}: {leaf.nan} NaN, {leaf.inf} infinite, largest finite {leaf.largest:.3g}"
        for leaf in shown[:_SHOWN]
    ]
    return out
