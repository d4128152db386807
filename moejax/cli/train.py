"""`moejax train`: trains a config in a workdir, or resumes what is there."""

from __future__ import annotations

from collections.abc import Sequence

from moejax.cli.flags import (
    Parser,
    add_config,
    add_devices,
    devices_per_host,
    exit_code,
    required_config,
    start_devices,
)
from moejax.config import ConfigError, check_asked

EXAMPLES = (
    "moejax train --config=tiny --workdir=runs/tiny --devices=8",
    "moejax train --config=tiny --workdir=runs/short --config.train.num_steps=50 \\",
    "    --config.mesh.fsdp=-1 --config.mesh.expert=1",
    "moejax train --config=my_config.py --workdir=/data/run --config.init_from=runs/tiny",
)


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 when the run ended, 128 + signal when one stopped it (it has saved then).

    See `flags.exit_code`.
    """
    parser = Parser(
        "train",
        what="Trains a model. The run lives in its workdir: called again it resumes from the "
        "newest checkpoint, or says that it is finished. Ctrl-C and SIGTERM save, then stop.",
        examples=EXAMPLES,
    )
    add_config(parser)
    parser.add_argument(
        "--workdir", metavar="DIR", help="folder of checkpoints, metrics.jsonl and tokenizer"
    )
    add_devices(parser)
    options, overrides = parser.parse(argv)
    cfg = required_config(options, overrides)
    if not options.workdir:
        raise ConfigError("--workdir is needed: the folder the run lives in.")
    check_asked(cfg, overrides)
    count = start_devices(options)
    cfg.check(count, devices_per_host(options))

    from moejax.train import run

    result = run(cfg, options.workdir, name=options.config, overrides=overrides)
    return exit_code(options, result.signum)
