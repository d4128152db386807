"""`moejax data prepare`: tokenises text once, before the runs that use it."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moejax.cli.bars import ByteBar
from moejax.cli.flags import Parser, add_config, required_config
from moejax.cli.tables import Column, print_table, say
from moejax.config import ConfigError

if TYPE_CHECKING:
    from moejax.data import Report

EXAMPLES = (
    "moejax data prepare --config=small --out=cache/stdlib",
    "moejax data prepare --config=small --out=cache/web --workers=8 \\",
    "    --config.data.source=parquet --config.data.paths=\"('web/*.parquet',)\" \\",
    "    --config.data.tokenizer=tokenizer.json",
    "moejax train --config=small --workdir=runs/web --config.data.source=cache \\",
    "    --config.data.paths=\"('cache/web',)\" --config.data.tokenizer=cache/web/tokenizer.json",
)
REPORT = "report.json"


def main(argv: Sequence[str]) -> int:
    """Writes the cache and says what is in it."""
    parser = _parser()
    argv = list(argv)
    if argv[:1] == ["prepare"]:
        argv = argv[1:]
    elif not argv or argv[0] not in ("-h", "--help"):
        given = f"unknown action {argv[0]!r}; " if argv else ""
        raise ConfigError(f"{given}the action is `moejax data prepare`.")
    options, overrides = parser.parse(argv)
    cfg = required_config(options, overrides)
    if not options.out:
        raise ConfigError("--out is needed: the folder of the cache, such as --out=cache/web.")
    out = pathlib.Path(options.out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out={out} is a file; name a folder.")
    workers = (os.cpu_count() or 1) if options.workers is None else options.workers

    from moejax.data import prepare

    began = time.perf_counter()
    with ByteBar("tokenising", enabled=cfg.log.progress) as bar:
        reports = prepare(cfg.data, out, workers=workers, progress=bar.update)
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "sources": [report.as_json() for report in reports]}
    (out / REPORT).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(found))
    else:
        _print_reports(reports, out, seconds)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "data prepare",
        what="Tokenises the config's text (of a mixture: every member) into a cache, which a run "
        "reads without loading it. Interrupted, the same call goes on where it was. Reports "
        "documents, tokens and bytes, also as report.json in the cache.",
        examples=EXAMPLES,
    )
    add_config(parser)
    parser.add_argument("--out", metavar="DIR", help="folder of the cache")
    parser.add_argument(
        "--workers", type=_count, metavar="N", help="processes, 0 = only this one (default: cores)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) > 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes from 0 to 1024")
    return int(text)


def _print_reports(reports: list[Report], out: pathlib.Path, seconds: float) -> None:
    rows = [
        (
            report.name,
            f"{report.documents:,}",
            f"{report.tokens:,}",
            f"{report.bytes:,}",
            f"{report.tokens_per_byte:.4f}",
            f"{report.splits['validation']['tokens']:,}",
        )
        for report in reports
    ]
    heads = ("source", "documents", "tokens", "bytes", "tokens/byte", "held out")
    print_table([Column(right=i > 0) for i in range(len(heads))], rows, heads)
    reused = sum(report.reused for report in reports)
    kept = f", {reused} shards were there already" if reused else ""
    say(f"{out}: {seconds:.1f} s{kept}")
