"""`moejax export-hf`: a checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from moejax.cli.bars import ByteBar
from moejax.cli.flags import Parser, add_source, sigterm_as_interrupt
from moejax.cli.tables import say, size
from moejax.config import ConfigError

EXAMPLES = (
    "moejax export-hf runs/tiny --out=export/tiny",
    "moejax export-hf runs/k3/checkpoints/400 --out=export/k3 --experts=mxfp4 --shard-size=10GB",
)
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def main(argv: Sequence[str]) -> int:
    """Exports, and says what was written."""
    parser = Parser(
        "export-hf",
        what="Writes a checkpoint as the folder that the family's own code loads: names, shapes, "
        "types, shards and config.json of the published format. What was imported and not trained "
        "comes back bit for bit.",
        examples=EXAMPLES,
        config=False,
    )
    add_source(parser, "CKPT", "a workdir (its newest checkpoint) or one step")
    parser.add_argument("--out", metavar="DIR", help="folder to make")
    parser.add_argument(
        "--dtype", default="source", metavar="TYPE",
        help="source (as imported; bfloat16 otherwise), float32 or bfloat16 (default: source)",
    )  # fmt: skip
    parser.add_argument(
        "--experts", default="source", metavar="TYPE",
        help="type of the routed experts: source, float32, bfloat16 or mxfp4 (default: as --dtype)",
    )  # fmt: skip
    parser.add_argument(
        "--shard-size", default="5GB", metavar="SIZE", help="limit of a file (default: 5GB)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options, _ = parser.parse(argv)
    if not options.CKPT or not options.out:
        raise ConfigError("give a checkpoint and --out: moejax export-hf CKPT --out=DIR.")

    from moejax.checkpoint.hf_export import export_hf

    with sigterm_as_interrupt(), ByteBar("exporting") as bar:
        report = export_hf(
            options.CKPT, options.out, dtype=options.dtype, experts=options.experts,
            max_shard_bytes=read_size(options.shard_size), on_bytes=bar.update,
        )  # fmt: skip
    if options.json:
        print(json.dumps({**report._asdict(), "out": str(report.out)}))
        return 0
    carried = f" and {report.num_carried:,} carried" if report.num_carried else ""
    say(
        f"{report.out}: {report.model_type}, {report.num_tensors:,} tensors{carried}, "
        f"{size(report.total_bytes)}"
    )
    return 0


def read_size(text: str) -> int:
    """Bytes of `5GB`, `200MB` or `1000`.

    Raises:
      ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(\d{1,15})\s*([kmg]b)?", text.strip().lower())
    if not match or not int(match[1]):
        raise ConfigError(f"--shard-size={text} is no size: write it as 5GB, 200MB or 1000.")
    return int(match[1]) * _UNITS[match[2] or ""]
