"""Golden curves: the loss of every step of two runs, kept in `tests/golden/*.json`.

Compare the first 20 steps with what is kept (exit code 1 where a step differs by more than 1e-3):

    python -m tests.golden.record small          # the model of tests/e2e on tests/fixtures/text
    python -m tests.golden.record tiny           # configs/tiny.py on the standard library
    python -m tests.golden.record tiny --whole   # all its steps: validation losses within 2 %

Add `--write` to keep the new curve instead, after a change that is meant to move it.

A curve belongs to one text: the standard library differs with the Python release, so `tiny.json`
holds a curve for each SHA-256 of its training split, and only that of this machine is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIRST_STEPS, TOLERANCE = 20, 1e-3
# A rounding flips an expert's choice sooner or later, and single steps part; the result must not.
WHOLE_TOLERANCE = 2e-2


def curve(workdir: Path) -> dict[str, Any]:
    """The curve of a run: which text and tokenizer it read, and the losses it logged."""
    facts = json.loads((workdir / "run.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "corpus_sha256": facts["corpus"]["train"]["sha256"],
        "tokenizer_sha256": facts["tokenizer"]["sha256"],
        "python": facts["python"],
        "jax": facts["jax"],
        "losses": [line["loss"] for line in lines],
        "eval_losses": {
            str(line["step"]): line["eval_loss"] for line in lines if line["eval_loss"] is not None
        },
    }


def kept(name: str, corpus_sha256: str) -> dict[str, Any] | None:
    """The golden curve `name` for this text, None where none was recorded."""
    path = HERE / f"{name}.json"
    curves = json.loads(path.read_text())["curves"] if path.exists() else []
    return next((c for c in curves if c["corpus_sha256"] == corpus_sha256), None)


def difference(found: dict[str, Any], golden: dict[str, Any]) -> tuple[float, int]:
    """Largest relative difference of a loss both curves have, and its step."""
    pairs = zip(found["losses"], golden["losses"], strict=False)
    return max((abs(a - b) / abs(b), step) for step, (a, b) in enumerate(pairs, start=1))


def write(name: str, found: dict[str, Any]) -> Path:
    """Puts a curve in the place of the one of the same text."""
    path = HERE / f"{name}.json"
    curves = json.loads(path.read_text())["curves"] if path.exists() else []
    others = [c for c in curves if c["corpus_sha256"] != found["corpus_sha256"]]
    path.write_text(json.dumps({"curves": [*others, found]}, indent=1) + "\n")
    return path


def run(name: str, workdir: Path, *, whole: bool = False) -> dict[str, Any]:
    """Trains `small` or `tiny` for 20 steps or to its end. Returns its curve."""
    import moejax
    from tests.e2e.small import SMALL

    config, settings = ("base", SMALL) if name == "small" else ("tiny", {})
    stop = {} if whole else {"train.stop_at": FIRST_STEPS, "eval.every": 0, "checkpoint.every": 0}
    moejax.train(config, workdir, settings | stop)
    return curve(workdir)


def main(argv: list[str] | None = None) -> int:
    """Runs, then compares or writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=("small", "tiny"))
    parser.add_argument("--whole", action="store_true", help="all steps, not the first 20")
    parser.add_argument("--write", action="store_true", help="keep this curve as the golden one")
    options = parser.parse_args(argv)
    if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
        os.environ["XLA_FLAGS"] = flags.strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    file = f"{options.name}_whole" if options.whole else options.name
    with tempfile.TemporaryDirectory() as folder:
        found = run(options.name, Path(folder, "work"), whole=options.whole)
    if options.write:
        print(f"{write(file, found)}: {len(found['losses'])} steps")
        return 0
    golden = kept(file, found["corpus_sha256"])
    if golden is None:
        print(f"no curve {file} for the text {found['corpus_sha256']}; --write keeps this one")
        return 1
    worst, step = difference(found, golden)
    if not options.whole:
        print(f"largest difference {worst:.1e}, at step {step} (allowed: {TOLERANCE})")
        return int(worst > TOLERANCE)
    pairs = [(found["eval_losses"][at], loss) for at, loss in golden["eval_losses"].items()]
    worst_eval = max(abs(a - b) / b for a, b in pairs)
    print(
        f"largest difference of a step's loss {worst:.1e}, at step {step}; of a validation loss "
        f"{worst_eval:.1e} (allowed: {WHOLE_TOLERANCE})"
    )
    return int(worst_eval > WHOLE_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
