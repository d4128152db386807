"""`moejax import-lora`: an adapter in PEFT's form becomes a LoRA run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from moejax.cli.flags import Parser, add_source, sigterm_as_interrupt
from moejax.cli.tables import say
from moejax.config import ConfigError

EXAMPLES = (
    "moejax import-lora adapters/answers --base=models/Kimi-Linear-48B-A3B --out=runs/answers",
    "moejax generate --checkpoint=runs/answers --prompt='The capital of France is'",
    "moejax finetune --init-from=models/Kimi-Linear-48B-A3B --config=runs/answers \\",
    "    --workdir=runs/answers --data=chats.jsonl",
)


def main(argv: Sequence[str]) -> int:
    """Imports, and says what came."""
    parser = Parser(
        "import-lora",
        what="Turns an adapter in PEFT's form (adapter_config.json, adapter_model.safetensors) "
        "into the folder of a LoRA run that has made no step: it can be generated with, "
        "evaluated, trained on, merged. The base stays where it is and is read when needed.",
        examples=EXAMPLES,
        config=False,
    )
    add_source(parser, "DIR", "folder with adapter_config.json and adapter_model.safetensors")
    parser.add_argument(
        "--base", metavar="DIR",
        help="the model that it was trained on: a workdir, one step, or a Hugging Face folder",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="workdir to make")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options, _ = parser.parse(argv)
    if not options.DIR or not options.base or not options.out:
        raise ConfigError(
            "give an adapter, --base and --out: moejax import-lora DIR --base=MODEL --out=WORKDIR."
        )

    from moejax.train.import_lora import import_lora

    with sigterm_as_interrupt():
        report = import_lora(options.DIR, options.base, options.out)
    if options.json:
        print(json.dumps({**report._asdict(), "checkpoint": str(report.checkpoint)}))
        return 0
    say(
        f"{report.checkpoint}: {report.num_adapters:,} adapters, {report.num_values:,} values, "
        f"over {options.base}"
    )
    for note in report.notes:
        say(f"note: {note}")
    return 0
