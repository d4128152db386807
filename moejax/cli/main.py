"""`moejax COMMAND`: finds the command and turns its errors into one line."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence

from moejax.config import ConfigError, nearest
from moejax.version import __version__

# Command -> its module, imported when it is called: `--version` and `--help` need no JAX.
COMMANDS = {
    "train": ("moejax.cli.train", "train a config in a workdir, or resume what is there"),
    "eval": ("moejax.cli.evaluate", "loss of a checkpoint on a split"),
    "finetune": ("moejax.cli.finetune", "train a model on conversations: in full, or adapters"),
    "generate": ("moejax.cli.generate", "text that a model continues"),
    "launch": ("moejax.cli.launch", "a command in several processes that share one run"),
    "config": ("moejax.cli.config", "resolved config, parameter counts, sharding table"),
    "replay": ("moejax.cli.replay", "the batch of a bad step once more: which tensor is bad"),
    "place": ("moejax.cli.place", "which device should hold which expert, by recorded loads"),
    "compile": ("moejax.cli.compile", "does the train step fit hardware that is not here?"),
    "cost": ("moejax.cli.cost", "memory, FLOPs, traffic and least time on several hardware"),
    "bench": ("moejax.cli.bench", "kernels beside plain ways to compute the same: time and memory"),
    "report": ("moejax.cli.report", "a run as pictures and one page: loss, load of every expert"),
    "import-hf": ("moejax.cli.import_hf", "a Hugging Face folder becomes a checkpoint"),
    "export-hf": ("moejax.cli.export_hf", "a checkpoint becomes a Hugging Face folder"),
    "import-lora": ("moejax.cli.import_lora", "an adapter in PEFT's form becomes a LoRA run"),
    "export-lora": ("moejax.cli.export_lora", "the adapters of a run in PEFT's form"),
    "merge-lora": ("moejax.cli.merge_lora", "adapters folded into the weights beneath them"),
    "verify": ("moejax.cli.verify", "a card of checks on a Hugging Face folder"),
    "data": ("moejax.cli.data", "tokenise text once, before the runs that use it"),
    "tokenizer": ("moejax.cli.tokenizer", "train a byte-level BPE on the config's text"),
}
_BAD_INPUT, _INTERRUPTED, _NO_READER = 2, 130, 141


def help_text() -> str:
    """What `moejax --help` prints."""
    rows = "".join(f"  {name:<13}{what}\n" for name, (_, what) in COMMANDS.items())
    return (
        f"moejax {__version__}: trains the Kimi-K3 family of mixture-of-experts models in JAX.\n\n"
        "usage: moejax COMMAND [options]\n\n"
        f"commands:\n{rows}\n"
        "options:\n"
        "  --help     this text; `moejax COMMAND --help` tells more\n"
        "  --version  the version\n\n"
        "examples:\n"
        "  moejax train --config=tiny --workdir=runs/tiny --devices=8\n"
        "  moejax eval --workdir=runs/tiny --devices=8\n"
        "  moejax config --config=kimi_k3 --devices=128\n\n"
        "MOEJAX_DEBUG=1 shows the traceback of an error.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, 2 for bad input, 130 for Ctrl-C.

    Some commands add codes of their own (`compile`: 3 for what does not fit).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with _plain_warnings():
            code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Nobody reads any more; the interpreter would complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except (ConfigError, OSError, ValueError) as error:
        if not _about_input(error):
            raise
        if os.environ.get("MOEJAX_DEBUG") == "1":
            traceback.print_exc()
        print(f"error: {one_line(error)}", file=sys.stderr)
        return _BAD_INPUT


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """While a command runs our own warnings are one line each, without file and source."""
    with warnings.catch_warnings():
        others, ours = warnings.showwarning, str(pathlib.Path(__file__).resolve().parents[1])

        def show(message, category, filename, *rest):
            if filename.startswith(ours):
                print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
            else:
                others(message, category, filename, *rest)

        warnings.showwarning = show
        yield


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print(help_text(), end="", file=sys.stderr)
        return _BAD_INPUT
    command, *rest = argv
    if command in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if command in ("-V", "--version", "version"):
        print(f"moejax {__version__}")
        return 0
    if command not in COMMANDS:
        near = nearest(command, COMMANDS, count=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        known = ", ".join(COMMANDS)
        raise ConfigError(f"unknown command {command!r}.{hint} Commands: {known}.")
    try:
        return importlib.import_module(COMMANDS[command][0]).main(rest)
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)


def _about_input(error: BaseException) -> bool:
    """Whether an error tells the user something; a ValueError does when our own code raised it."""
    if isinstance(error, ConfigError | OSError):
        return True
    root = pathlib.Path(__file__).resolve().parents[2]
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    return any(raised_in.is_relative_to(root / name) for name in ("moejax", "pallas_kernels"))


def one_line(error: BaseException) -> str:
    """The message without line breaks; of an OSError its reason and file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'system'}: {error.strerror}."
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{text} (MOEJAX_DEBUG=1 shows where.)"


if __name__ == "__main__":
    sys.exit(main())
