"""`moejax export-lora`: the adapters of a run in PEFT's form."""

from __future__ import annotations

import json
from collections.abc import Sequence

from moejax.cli.flags import Parser, add_source, sigterm_as_interrupt
from moejax.cli.tables import say, size
from moejax.config import ConfigError

EXAMPLES = (
    "moejax export-lora runs/lora --out=adapters/answers",
    "moejax export-lora runs/lora/checkpoints/400 --out=adapters/answers --names=checkpoint",
)


def main(argv: Sequence[str]) -> int:
    """Exports, and says what was written."""
    parser = Parser(
        "export-lora",
        what="Writes the adapters of a LoRA run as adapter_config.json and "
        "adapter_model.safetensors, which PEFT and what reads its files load.",
        examples=EXAMPLES,
        config=False,
    )
    add_source(parser, "RUN", "a LoRA run's workdir (its newest checkpoint) or one step")
    parser.add_argument("--out", metavar="DIR", help="folder to make")
    parser.add_argument(
        "--names", default="transformers", metavar="KIND",
        help="module names: transformers (of the family's class there, experts fused; where there "
        "is none, as in its checkpoint) or checkpoint (every expert alone) (default: transformers)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", default="float32", metavar="TYPE", help="float32 or bfloat16 (default: float32)"
    )
    parser.add_argument(
        "--base-name", metavar="NAME",
        help="base_model_name_or_path (default: where the run's base came from)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options, _ = parser.parse(argv)
    if not options.RUN or not options.out:
        raise ConfigError("give a LoRA run and --out: moejax export-lora RUN --out=DIR.")

    from moejax.checkpoint.peft_export import export_lora

    with sigterm_as_interrupt():
        report = export_lora(
            options.RUN, options.out, names=options.names, dtype=options.dtype,
            base=options.base_name,
        )  # fmt: skip
    file = report.file
    if options.json:
        facts = {**file._asdict(), "out": str(file.out), "model_type": report.model_type}
        print(json.dumps({**facts, "names": report.names, "notes": report.notes}))
        return 0
    say(
        f"{file.out}: {file.num_adapters:,} adapters for {report.model_type} under the names of "
        f"its {'class in transformers' if report.names == 'transformers' else 'checkpoint'}, "
        f"{file.num_values:,} values, {size(file.total_bytes)}"
    )
    for note in report.notes:
        say(f"note: {note}")
    return 0
