"""`moejax launch local`: one command in several processes of this machine, as one run."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from moejax.cli.flags import Parser, positive
from moejax.cluster import Supervisor
from moejax.config import ConfigError

EXAMPLES = (
    "moejax launch local --processes=4 --devices-per-process=2 -- \\",
    "    train --config=tiny --workdir=runs/tiny",
    "moejax launch local --processes=8 --restarts=3 -- train --config=my.py --workdir=/data/run",
)
_COMMANDS = ("train", "eval", "finetune")  # those that know several processes


def main(argv: Sequence[str]) -> int:
    """Exit code: that of the first process that failed, 0 when none did."""
    argv, command = _split(argv)
    parser = Parser(
        "launch",
        what="Runs a command in several processes that share one run, here and for real: the same "
        "code path as on several hosts. When one fails the others are ended. Ctrl-C and SIGTERM "
        "reach all of them: they save, then stop.",
        examples=EXAMPLES,
    )
    parser.add_argument("where", nargs="?", help="local: this machine")
    parser.add_argument("--processes", type=positive, metavar="N", help="how many")
    parser.add_argument(
        "--devices-per-process", type=positive, metavar="N", help="simulated CPU devices of each"
    )
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N",
        help="start all again when one failed, this often at most (default 0)",
    )  # fmt: skip
    parser.add_argument(
        "--grace", type=float, default=60.0, metavar="SECONDS",
        help="what processes get to end by themselves (default 60)",
    )  # fmt: skip
    parser.add_argument(
        "--logs", metavar="DIR", help="a file of each process' output (default: WORKDIR/logs)"
    )
    options, _ = parser.parse(argv)
    if options.where != "local":
        raise ConfigError(
            f"moejax launch {options.where or ''}: only `local` is known, this machine."
        )
    if not options.processes:
        raise ConfigError("--processes=N is needed: how many processes to start.")
    if options.restarts < 0 or not 0 < options.grace < float("inf"):
        raise ConfigError("--restarts must be at least 0, and --grace above 0 seconds.")
    if not command or command[0] not in _COMMANDS:
        raise ConfigError(
            f"give the command after --, one of {', '.join(_COMMANDS)}, as in: moejax launch local "
            "--processes=2 -- train --config=tiny --workdir=runs/tiny"
        )
    return _run(options, command)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and behind the `--`."""
    argv = list(argv)
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def _run(options, command: list[str]) -> int:
    program = [sys.executable, "-m", "moejax.cli.main", *command, "--multihost"]
    if options.devices_per_process:
        program.append(f"--devices={options.devices_per_process}")
    logs = options.logs or _logs_of(command)
    for attempt in range(options.restarts + 1):
        supervisor = Supervisor(
            program, options.processes, logs=pathlib.Path(logs) if logs else None,
            grace_s=options.grace, say=_say,
        )  # fmt: skip
        code = supervisor.run()
        if code in (0, 2) or supervisor.signalled or attempt == options.restarts:
            return code
        _say(f"exit code {code}: starting again, {options.restarts - attempt} of "
             f"{options.restarts} times left")  # fmt: skip
    return code


def _logs_of(command: list[str]) -> str | None:
    """The folder for logs inside the command's workdir; None where it names none."""
    for place, word in enumerate(command):
        name, _, value = word.partition("=")
        if name == "--workdir":
            value = value or "".join(command[place + 1 : place + 2])
            # the address of an object store is no folder, which the command itself says
            return str(pathlib.Path(value) / "logs") if value and "://" not in value else None
    return None


def _say(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr, flush=True)
