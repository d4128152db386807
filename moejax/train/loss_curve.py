"""Where a loss starts and where it goes: at random weights, in full training, under LoRA.

    python -m moejax.train.loss_curve --step0=step0.json
    python -m moejax.train.loss_curve --step0=step0.json --full=runs/bytes --lora=runs/lora \\
        --out=losses.png

The first measures randomly initialised models of K3's shape at several widths and keeps the figures
in the file; the second also reads the metrics of two runs and draws all three, apart from each
other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from moejax.config import ConfigError
from moejax.config.load import RESOLVED_FILE, load_config
from moejax.observability.curve_plots import first_at_most, held_out, plot_losses
from moejax.observability.metrics import read_metrics
from moejax.observability.plots import series
from moejax.train.step0 import WIDTHS, Step0, measure


def table(found: Sequence[Step0]) -> str:
    """Prediction beside measurement, as Markdown."""
    lines = [
        "| width D | std s | parameters in layers | ln V + D s²/2 | measured, all labels "
        "| one random label a token |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.width} | {one.std:g} | {one.parameters:,} | {one.predicted:.3f} "
        f"| {one.measured:.3f} | {one.drawn:.2f} ± {one.error:.2f} |"
        for one in found
    ]
    return "\n".join(lines)


def step0(path: pathlib.Path, widths: Sequence[int], again: bool) -> list[Step0]:
    """The figures in a file, measured first where it is missing.

    Raises:
      ConfigError: a file that is not of this kind, or a width that is not allowed.
    """
    if path.exists() and not again:
        try:
            return [Step0(**one) for one in json.loads(path.read_text(encoding="utf-8"))]
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"--step0={path} holds no figures of this script; name another file, or measure "
                "them again with --widths."
            ) from error
    found = []
    for width in widths:
        found.append(measure(width))
        print(f"width {width}: {found[-1].measured:.3f}", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [dataclasses.asdict(one) for one in found]
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return found


def full_line(workdir: str, target: float) -> str:
    """What a run's held-out loss did, in a sentence."""
    _, steps, values = held_out(workdir)
    passed = first_at_most(steps, values, target)
    where = f"at most {target:g} from step {passed}" if passed else f"never at most {target:g}"
    return f"full training: held-out {values[-1]:.3f} nats per byte at step {steps[-1]}, {where}"


def lora_line(workdir: str, before: tuple[float, float] | None) -> str:
    """A LoRA run's validation loss, before (or first) and last."""
    _, steps, per_byte = held_out(workdir)
    _, per_token = series(read_metrics(workdir), "eval_loss")
    when, first = f"at step {steps[0]}", (per_token[0], per_byte[0])
    if before:
        when, first = "of the base", before
    return (
        f"LoRA: validation {first[0]:.3f} nats per token {when}, {per_token[-1]:.3f} at step "
        f"{steps[-1]}; {first[1]:.3f} and {per_byte[-1]:.3f} per byte"
    )


def check_kinds(full: str | None, lora: str | None) -> None:
    """Raises ConfigError for a run of adapters as `full`, or one without them as `lora`.

    A folder with metrics alone is taken as it is.
    """
    for option, workdir, wanted in (("--full", full, False), ("--lora", lora, True)):
        if workdir and (pathlib.Path(workdir) / RESOLVED_FILE).is_file():
            rank = load_config(workdir).lora.rank
            if bool(rank) != wanted:
                kind = f"adapters of rank {rank}" if rank else "all weights, no adapters"
                raise ConfigError(f"{option}={workdir} is a run that trains {kind}.")


def read_eval(path: pathlib.Path, lora: str | None) -> tuple[float, float]:
    """Nats per token and per byte out of what `moejax eval --json` printed.

    Args:
      path: the file.
      lora: the run whose base it is of.
    Raises:
      ConfigError: no such file, or another one, or of another model than the run's base.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        losses = float(found["loss"]), float(found["nats_per_byte"])
        checkpoint = pathlib.Path(found["checkpoint"]).absolute()
    except OSError as error:
        raise ConfigError(f"--before={path}: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--before={path} is no output of `moejax eval --json`.") from error
    if lora and (pathlib.Path(lora) / RESOLVED_FILE).is_file():
        base = pathlib.Path(load_config(lora).init_from).expanduser().absolute()
        if base != checkpoint and base not in checkpoint.parents:
            raise ConfigError(
                f"--before={path} is of {checkpoint}, but the base of --lora={lora} is {base}."
            )
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, reads, prints and draws what is asked for. Returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m moejax.train.loss_curve",
                                     description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    parser.add_argument("--step0", required=True, type=pathlib.Path, metavar="FILE",
                        help="JSON figures at random weights, measured if missing")  # fmt: skip
    parser.add_argument("--widths", type=int, nargs="+", metavar="D",
                        help=f"measure these widths, again if need be ({WIDTHS})")  # fmt: skip
    parser.add_argument("--full", metavar="WORKDIR", help="a run that trains every weight")
    parser.add_argument("--lora", metavar="WORKDIR", help="a LoRA run over trained weights")
    parser.add_argument("--before", type=pathlib.Path, metavar="FILE",
                        help="`moejax eval --json` of its base, on the same text")  # fmt: skip
    parser.add_argument("--target", type=float, default=1.7, help="nats per byte to mark")
    parser.add_argument("--out", metavar="PNG", help="the picture; needs --full and --lora")
    options = parser.parse_args(argv)
    try:
        if options.out and not (options.full and options.lora):
            raise ConfigError("--out draws three panels: give --full=WORKDIR and --lora=WORKDIR.")
        check_kinds(options.full, options.lora)
        before = read_eval(options.before, options.lora) if options.before else None
        lines = [full_line(options.full, options.target)] if options.full else []
        lines += [lora_line(options.lora, before)] if options.lora else []
        found = step0(options.step0, options.widths or WIDTHS, again=bool(options.widths))
        print("\n\n".join([table(found), *lines]))
        if options.out:
            points = [(one.width, one.measured) for one in found]
            shape = found[0].vocabulary, found[0].std
            print(plot_losses(
                points, *shape, options.full, options.lora, options.out,
                target=options.target, before=before,
            ))  # fmt: skip
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
