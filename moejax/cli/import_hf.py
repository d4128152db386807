"""`moejax import-hf`: a Hugging Face folder becomes a moejax checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence

from moejax.cli.bars import ByteBar
from moejax.cli.flags import Parser, add_source, sigterm_as_interrupt
from moejax.cli.tables import say, size
from moejax.config import ConfigError

EXAMPLES = (
    "moejax import-hf models/Kimi-Linear-48B-A3B --out=runs/kimi_linear",
    "moejax import-hf models/DeepSeek-V3.2 --out=runs/v32 --dtype=float32",
    "moejax import-hf models/Kimi-K3 --out=runs/k3 --experts=packed",
    "moejax generate --checkpoint=runs/kimi_linear --prompt='The capital of France is'",
)


def main(argv: Sequence[str]) -> int:
    """Imports, and says what came."""
    parser = Parser(
        "import-hf",
        what="Turns a Hugging Face folder (config.json, safetensors, tokenizer) into a moejax "
        "checkpoint, tensor by tensor: a model larger than memory is no problem. Reads bf16, f32, "
        "fp8 with block scales and MXFP4; only JSON and safetensors are opened.",
        examples=EXAMPLES,
        config=False,
    )
    add_source(parser, "SRC", "folder with config.json and .safetensors files")
    parser.add_argument("--out", metavar="DIR", help="workdir to make")
    parser.add_argument(
        "--dtype", default="auto", metavar="TYPE",
        help="auto (as stored; codes as bfloat16), float32 or bfloat16 (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--experts", default="unpacked", metavar="FORM",
        help="unpacked, or packed: routed experts in MXFP4 keep their bytes (default: unpacked)",
    )  # fmt: skip
    parser.add_argument(
        "--allow", action="append", default=[], metavar="NAME",
        help="carry along tensors whose names begin so, although no part answers to them",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options, _ = parser.parse(argv)
    if not options.SRC or not options.out:
        raise ConfigError("give a folder and --out: moejax import-hf SRC --out=DIR.")

    from moejax.checkpoint.hf_import import import_hf

    with sigterm_as_interrupt(), ByteBar("importing") as bar:
        report = import_hf(
            options.SRC, options.out, dtype=options.dtype, experts=options.experts,
            allow=options.allow, on_bytes=bar.update,
        )  # fmt: skip
    facts = {**report._asdict(), "checkpoint": str(report.checkpoint)}
    if options.json:
        print(json.dumps(facts))
        return 0
    values = ", ".join(f"{count:,} in {name}" for name, count in report.dtypes.items())
    speed = report.source_bytes / 1e6 / max(report.seconds, 1e-9)
    say(
        f"{report.checkpoint}: {report.model_type}, {report.num_tensors:,} tensors ({values})"
        f"{f', {report.num_carried:,} carried along' if report.num_carried else ''}; "
        f"{size(report.source_bytes)} in {report.seconds:.1f} s, {speed:.0f} MB/s"
    )
    for name in report.absent:
        say(f"not in the folder, and read by no layer: {name}")
    return 0
