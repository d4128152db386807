"""`moejax report`: a run as pictures and one page."""

from __future__ import annotations

import json
from collections.abc import Sequence

from moejax.cli.flags import Parser, positive
from moejax.cli.tables import Column, print_table, say
from moejax.config import ConfigError

EXAMPLES = (
    "moejax report --workdir=runs/tiny",
    "moejax report --workdir=runs/tiny --out=/tmp/tiny --window=1000",
)
_MOST_LAYERS = 10


def main(argv: Sequence[str]) -> int:
    """Writes the report and prints what it says in short."""
    parser = Parser(
        "report",
        what="Draws a run, finished or not: loss, speed, the load of every expert of every layer, "
        "experts without tokens, rounds of the exchange. Writes report.html, one file that needs "
        "no network, and its pictures as PNG into report/.",
        examples=EXAMPLES,
        config=False,
    )
    parser.add_argument("--workdir", metavar="DIR", help="the folder of a run")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: the workdir)")
    parser.add_argument(
        "--window", type=positive, default=100, metavar="N",
        help="steps at the end that the map and the dead experts are about (default: 100)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    options, overrides = parser.parse(argv)
    if overrides:
        raise ConfigError("a report has no --config.FIELD: it draws what the run has written.")
    if not options.workdir:
        raise ConfigError("--workdir is needed: the folder of the run to draw.")

    from moejax.observability.report import write_report

    report = write_report(options.workdir, options.out, window=options.window)
    dead = report.dead or []
    if options.json:
        found = {"page": str(report.page), "pictures": [str(p) for p in report.pictures]}
        listed = [{"layer": d.layer, "expert": d.expert, "last_step": d.last_step} for d in dead]
        facts = {"facts": dict(report.facts), "dead": listed, "window": report.window}
        print(json.dumps(found | facts))
        return 0
    print_table((Column(dim=True), Column()), report.facts)
    layers = sorted({one.layer for one in dead})
    for layer in layers[:_MOST_LAYERS]:
        names = ", ".join(str(one.expert) for one in dead if one.layer == layer)
        say(f"layer {layer}: no token for {names}")
    if len(layers) > _MOST_LAYERS:
        say(f"... and in {len(layers) - _MOST_LAYERS} more layers")
    say(f"{report.page}, and {len(report.pictures)} pictures in {report.pictures[0].parent}")
    return 0
