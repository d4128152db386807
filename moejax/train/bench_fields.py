"""Options of the benches that train: their own, and --config.FIELD=VALUE for every field."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parse_with_fields(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, dict[str, str]]:
    """The parser's options, and the fields that are changed with their values as text.

    Anything else ends the program by the parser's error, exit code 2.
    """
    options, rest = parser.parse_known_args(argv)
    odd = next((w for w in rest if not (w.startswith("--config.") and "=" in w)), None)
    if odd:
        parser.error(f"unknown option {odd!r}; fields are changed by --config.FIELD=VALUE")
    pairs = (word.removeprefix("--config.").partition("=") for word in rest)
    return options, {name: value for name, _, value in pairs}
