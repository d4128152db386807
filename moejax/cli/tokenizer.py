"""`moejax tokenizer train`: a byte-level BPE from the config's training text."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from moejax.cli.flags import Parser, add_config, required_config
from moejax.config import ConfigError

EXAMPLES = (
    "moejax tokenizer train --config=small --out=tokenizer.json",
    "moejax tokenizer train --config=tiny --vocab-size=4096 --out=tokenizer.json \\",
    "    --config.data.source=files --config.data.paths=\"('texts/**/*.txt',)\"",
)


def main(argv: Sequence[str]) -> int:
    """Writes the tokenizer and says what it is."""
    parser = Parser(
        "tokenizer train",
        what="Trains a byte-level BPE on the training split of the config's text and writes it as "
        "a tokenizer.json, for --config.data.tokenizer=FILE.",
        examples=EXAMPLES,
    )
    add_config(parser)
    parser.add_argument("--out", metavar="FILE", help="where the tokenizer is written")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="tokens (default: data.bpe_vocab_size)"
    )
    argv = list(argv)
    if argv[:1] == ["train"]:
        argv = argv[1:]
    elif not argv or argv[0] not in ("-h", "--help"):
        given = f"unknown action {argv[0]!r}; " if argv else ""
        raise ConfigError(f"{given}the action is `moejax tokenizer train`.")
    options, overrides = parser.parse(argv)
    if options.vocab_size is not None:
        overrides["data.bpe_vocab_size"] = str(options.vocab_size)
    cfg = required_config(options, overrides | {"data.tokenizer": "bpe"})
    if not options.out:
        raise ConfigError("--out is needed: the file to write, such as --out=tokenizer.json.")
    out = pathlib.Path(options.out)
    if out.is_dir():
        raise ConfigError(f"--out={out} is a folder; name the file to write.")

    from moejax.data import load_corpus, train_bpe, training_sample

    texts = training_sample(cfg.data)
    tokenizer = train_bpe(texts, cfg.data.bpe_vocab_size, out)
    corpus = load_corpus(cfg.data, "validation")
    tokens = sum(len(ids) + 1 for ids in tokenizer.encode_batch(corpus.texts))
    print(
        f"{out}: {tokenizer.vocab_size} tokens, {corpus.num_bytes / tokens:.3f} bytes a token on "
        f"the validation split of {corpus.name}; use it with --config.data.tokenizer={out}"
    )
    return 0
