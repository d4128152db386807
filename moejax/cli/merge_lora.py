"""`moejax merge-lora`: adapters folded into their base."""

from __future__ import annotations

import json
from collections.abc import Sequence

from moejax.cli.bars import ByteBar
from moejax.cli.flags import Parser, sigterm_as_interrupt
from moejax.cli.tables import say
from moejax.config import ConfigError

EXAMPLES = (
    "moejax merge-lora --workdir=runs/lora --out=runs/merged",
    "moejax merge-lora --adapter=adapters/answers --base=models/Kimi-Linear-48B-A3B \\",
    "    --out=runs/merged",
    "moejax export-hf runs/merged --out=export/merged --dtype=bfloat16",
)


def main(argv: Sequence[str]) -> int:
    """Merges, and says what was changed."""
    parser = Parser(
        "merge-lora",
        what="Adds adapters to the weights that they were trained on, in float32 and rounded once, "
        "and writes a checkpoint as import-hf does. One matrix (of one expert) is in memory at a "
        "time; what has no adapter stays as it is, bit for bit. Adapters of a run with "
        "lora.base_format=int8 or fp8 are added to the plain weights of its init_from. "
        "Of a run the data settings go along: `moejax eval` scores both alike.",
        examples=EXAMPLES,
        config=False,
    )
    parser.add_argument("--workdir", metavar="RUN", help="a LoRA run's folder, or one step of it")
    parser.add_argument("--adapter", metavar="DIR", help="or an adapter in PEFT's form")
    parser.add_argument(
        "--base", metavar="DIR",
        help="a workdir, one step, or a Hugging Face folder (default: the run's own)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="workdir to make")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options, _ = parser.parse(argv)
    if bool(options.workdir) == bool(options.adapter) or not options.out:
        raise ConfigError(
            "give --workdir=RUN or --adapter=DIR, and --out: moejax merge-lora --workdir=RUN "
            "--out=DIR."
        )

    from moejax.checkpoint.merge import merge_lora

    with sigterm_as_interrupt(), ByteBar("merging") as bar:
        report = merge_lora(
            options.out, run=options.workdir, adapter=options.adapter, base=options.base,
            on_bytes=bar.update,
        )  # fmt: skip
    if options.json:
        print(json.dumps({**report._asdict(), "checkpoint": str(report.checkpoint)}))
        return 0
    say(
        f"{report.checkpoint}: {report.num_adapters:,} adapters merged into "
        f"{report.num_changed:,} matrices in {report.seconds:.1f} s"
    )
    if report.num_quantised:
        say(
            f"note: {report.num_quantised:,} of them came in fewer bits; export-hf with "
            "--dtype=bfloat16 (--experts=bfloat16) keeps what was merged, in source types it is "
            "rounded to their codes again"
        )
    return 0
