"""What all subcommands share: how options are read, which devices are meant, one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from moejax.cluster import code_of, join
from moejax.cluster.place import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from moejax.config import ConfigError, RunConfig, flat_names, nearest
from moejax.config.load import load_config, shipped_names

_PREFIX = "--config."
_HOST_DEVICES = "--xla_force_host_platform_device_count"

CONFIG_HELP = """\
configuration:
  --config=NAME|FILE             a shipped config ({shipped}), a config
                                 file, or the folder of a run: the config it was made with
  --config.SECTION.FIELD=VALUE   change one field; tuples as Python writes them: "('a', 'b')"
  Sections: {sections}.
  `moejax config --fields` lists every field with its meaning, default and range.
"""


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line and a help text that says how configs work."""

    def __init__(self, command: str, *, what: str, examples: Iterable[str], config: bool = True):
        parts = [_config_help()] if config else []
        parts.append("examples:\n" + "".join(f"  {line}\n" for line in examples))
        super().__init__(
            prog=f"moejax {command}",
            description=textwrap.fill(what, 96),
            epilog="\n".join(parts),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=28, width=100
            ),
            allow_abbrev=False,
            usage=f"moejax {command} [options]" + (" [--config.FIELD=VALUE ...]" if config else ""),
        )

    def error(self, message: str) -> NoReturn:
        # argparse's words for --switch=value.
        if found := re.fullmatch(r"argument (.+): ignored explicit argument (.+)", message):
            message = f"{found[1]} takes no value, {found[2]} was given"
        raise ConfigError(f"{message}. `{self.prog} --help` lists the options.")

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
        """The options, and the config fields to change: dotted name -> text.

        Raises:
          ConfigError: an unknown option (with the nearest ones), or one without its value.
        """
        rest, overrides = split_overrides(argv)
        options, unknown = self.parse_known_args(rest)
        if unknown:
            known = [o for action in self._actions for o in action.option_strings]
            near = nearest(unknown[0].split("=")[0], known, count=2)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            kind = "option" if unknown[0].startswith("-") else "argument"
            self.error(f"unknown {kind} {unknown[0]!r}{hint}")
        return options, overrides


def _config_help() -> str:
    tops = dict.fromkeys(name.split(".")[0] for name in flat_names(RunConfig()) if "." in name)
    return CONFIG_HELP.format(shipped=", ".join(shipped_names()), sections=", ".join(tops))


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Options that are not `--config.FIELD`, and those that are: `=VALUE`, or the next word."""
    known = flat_names(RunConfig())
    rest: list[str] = []
    overrides: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith(_PREFIX):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix(_PREFIX).partition("=")
        has_next = bool(words) and not words[0].startswith("--")
        if equals:
            overrides[name] = value
        elif has_next:
            overrides[name] = words.pop(0)
        elif isinstance(known.get(name), bool):
            overrides[name] = "true"
        else:
            raise ConfigError(f"{word} needs a value: {word}=VALUE.")
    return rest, overrides


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A scheduler's SIGTERM ends as Ctrl-C does: what is half-written is taken back."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def add_source(parser: Parser, name: str, help: str) -> None:
    """One positional argument; None where it is missing, so that the command says what to give."""
    parser.add_argument(name, nargs="?", help=help)


def add_config(parser: Parser, help: str = "a shipped config, a config file, or a run") -> None:
    parser.add_argument("--config", metavar="NAME|FILE", help=help)


def add_devices(parser: Parser) -> None:
    """Options that decide what JAX runs on; they must be obeyed before JAX starts."""
    group = parser.add_argument_group("devices")
    group.add_argument("--platform", metavar="NAME", help="cpu, gpu or tpu (default: JAX chooses)")
    group.add_argument(
        "--devices", type=positive, metavar="N", help="simulate N devices on the CPU"
    )
    group.add_argument(
        "--multihost",
        action="store_true",
        help="join the other processes of the run, which `moejax launch`, SLURM, Open MPI, "
        "Kubernetes or a TPU pod has started",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT",
        help="with the next two, the place in the run by hand: where process 0 listens",
    )  # fmt: skip
    group.add_argument("--num-processes", type=positive, metavar="N", help="how many there are")
    group.add_argument("--process-id", metavar="I", help="which one this is, from 0")


def positive(text: str) -> int:
    """argparse type: a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def required_config(options: argparse.Namespace, overrides: dict[str, str]) -> RunConfig:
    """The config that `--config` names, with the fields changed."""
    if not options.config:
        raise ConfigError(f"--config is needed: one of {', '.join(shipped_names())}, or a file.")
    return load_config(options.config, overrides)


def start_devices(options: argparse.Namespace) -> int:
    """Starts JAX on the devices asked for. Returns how many there are, over all processes.

    Raises:
      ConfigError: the platform is not there, or JAX has started otherwise already.
    """
    platform, count = options.platform, options.devices
    if count and platform not in (None, "cpu"):
        raise ConfigError(
            f"--devices={count} simulates CPU devices; it does not go with --platform={platform}."
        )
    if count:
        platform = "cpu"
        others = re.sub(rf"{_HOST_DEVICES}=\S*", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{others} {_HOST_DEVICES}={count}".strip()
    if platform:
        os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(platform, platform)
    import jax  # only now: it reads both variables once

    if _place_by_hand(options) or options.multihost:
        found = join()
        if is_first_process():
            joined = jax.process_count()
            print(f"{joined} processes joined ({found.by}: {found.why})", file=sys.stderr)
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(_no_devices(error)) from error
    here = len(jax.local_devices())
    if count and here != count:
        raise ConfigError(f"--devices={count} comes too late: JAX runs with {here} devices.")
    if platform and devices[0].platform != platform:
        raise ConfigError(
            f"--platform={platform} comes too late: JAX runs on {devices[0].platform} already."
        )
    return len(devices)


def _place_by_hand(options: argparse.Namespace) -> bool:
    """Takes the place that options name, over what the environment says. Returns if they do."""
    names = {
        "coordinator": COORDINATOR, "num_processes": NUM_PROCESSES, "process_id": PROCESS_ID,
    }  # fmt: skip
    given = {env: vars(options).get(name) for name, env in names.items()}
    if all(value is None for value in given.values()):
        return False
    for env, value in given.items():
        os.environ[env] = "" if value is None else str(value)
    return True


def devices_per_host(options: argparse.Namespace) -> int:
    """Devices that come and go together; after `start_devices`."""
    import jax

    return len(jax.local_devices()) if options.multihost else 1


def _no_devices(error: BaseException) -> str:
    """One line for a backend that does not start; JAX raises a bare AssertionError for some."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    why = " ".join(str(error).split()) or "JAX finds no such device, or lacks the plugin for it"
    what = f"no devices of platform {asked!r}" if asked else "no devices"
    return f"{what}: {why.rstrip('.')}. Without one, --platform=cpu or --devices=N runs on the CPU."


def exit_code(options: argparse.Namespace, signum: int | None) -> int:
    """Of a run that saved and ended; see `moejax.cluster.code_of`."""
    return code_of(signum, several=options.multihost)


def is_first_process() -> bool:
    """Whether this is the process that prints; after `start_devices`."""
    import jax

    return jax.process_index() == 0
