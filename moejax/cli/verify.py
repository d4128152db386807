"""`moejax verify`: a card of checks on a Hugging Face folder."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from moejax.cli.flags import Parser, add_devices, add_source, start_devices
from moejax.cli.tables import say
from moejax.config import ConfigError

EXAMPLES = (
    "moejax verify models/Kimi-Linear-48B-A3B --json=card.json",
    "moejax verify models/tiny-k3 --reference=logits.npz --routing=pinned --devices=8",
    "moejax verify models/DeepSeek-V3.2 --skip='train step' --skip='save, resume'",
)
_FAILED = 1


def main(argv: Sequence[str]) -> int:
    """Prints the card; 1 when a check fails."""
    parser = Parser(
        "verify",
        what="Checks a Hugging Face folder from end to end: load, key coverage, dtypes, import, "
        "bit-equal export, logits against a reference file, one training step, save and resume to "
        "the same bits, export of the trained weights. Exit code 1 when a check fails.",
        examples=EXAMPLES,
        config=False,
    )
    add_source(parser, "SRC", "folder with config.json and .safetensors files")
    parser.add_argument(
        "--reference", metavar="FILE", help=".npz with input_ids and logits (any prefix)"
    )
    parser.add_argument(
        "--routing", choices=("free", "pinned"), default="free",
        help="pinned: take the experts that the reference names (near-ties may flip otherwise)",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, metavar="X",
        help="largest error of a logit over the largest logit (default: 1e-4)",
    )  # fmt: skip
    parser.add_argument(
        "--skip", action="append", default=[], metavar="CHECK", help="leave a check out"
    )
    parser.add_argument("--json", metavar="FILE", help="write the card as JSON")
    parser.add_argument("--folder", metavar="DIR", help="where copies are made (default: /tmp)")
    add_devices(parser)
    options, _ = parser.parse(argv)
    if not options.SRC:
        raise ConfigError("give a folder: moejax verify SRC.")
    start_devices(options)

    from moejax.verify import Check, verify

    def show(check: Check) -> None:
        say(f"{check.outcome:<8}{check.name:<15}{check.seconds:7.1f} s  {check.line}")

    card = verify(
        options.SRC, reference=options.reference, routing=options.routing,
        tolerance=options.tolerance, skip=options.skip, folder=options.folder, on_check=show,
    )  # fmt: skip
    if options.json:
        pathlib.Path(options.json).write_text(card.as_json() + "\n", encoding="utf-8")
    say(f"{card.source}: {'every check holds' if card.passed else 'FAILED'}")
    return 0 if card.passed else _FAILED
