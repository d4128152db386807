"""`moejax eval` of documents or answers that are scored one by one, and their report."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from moejax.cli.bars import CountBar
from moejax.cli.flags import is_first_process
from moejax.config import ConfigError, DataConfig, MemoryConfig, RunConfig
from moejax.config.load import apply_overrides, as_run_config, load_config

if TYPE_CHECKING:
    from moejax.data import Corpus, Tokenizer
    from moejax.generate import LanguageModel

_WINDOW = 2048  # of weights that come without a run's sequence length


class Subject(NamedTuple):
    """What is evaluated: a model, its config, its tokenizer, where it lies, and its window."""

    model: LanguageModel
    cfg: RunConfig
    tokenizer: Tokenizer
    where: pathlib.Path
    step: int | None
    window: int


def is_alone(options: argparse.Namespace) -> bool:
    """Whether the options ask for texts that are scored by themselves; a model folder always is."""
    from moejax.generate.load import is_hf_folder

    asked = options.files, options.per_document, options.multiple_choice, options.alone
    return any(asked) or is_hf_folder(pathlib.Path(options.workdir or options.checkpoint))


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not go together, before anything is read."""
    if options.multiple_choice and (options.files or options.per_document or options.split):
        raise ConfigError(
            "--multiple-choice goes without --files, --per-document and --split: its file is all "
            "that is scored."
        )
    if options.files and options.split:
        raise ConfigError("give --files or --split, not both: files are read whole.")
    if options.per_document:
        folder = pathlib.Path(options.per_document).absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"--per-document={options.per_document}: {folder} is not there.")


def run(options: argparse.Namespace, overrides: Mapping[str, Any], count: int) -> int:
    """Scores what the options name and prints the report; returns the exit code."""
    from moejax.generate.choices import read_questions
    from moejax.generate.scoring import Scorer

    questions = read_questions(options.multiple_choice) if options.multiple_choice else None
    subject = _open(options, overrides, count)
    corpus = None if questions else _corpus(options, subject.cfg)
    rows = subject.cfg.eval.batch_size or subject.cfg.data.batch_size
    scorer = Scorer(subject.model, batch_size=rows, max_length=subject.window)
    facts: dict[str, Any] = {"checkpoint": str(subject.where), "step": subject.step}
    if questions:
        facts |= _answers(scorer, subject, questions)
        line = (
            f"{facts['questions']} questions: accuracy {facts['accuracy']:.4f}, "
            f"{facts['accuracy_norm']:.4f} with likelihoods divided by length"
        )
    else:
        assert corpus is not None
        facts |= {"split": None if options.files else options.split or "validation"}
        facts |= _documents(scorer, subject, corpus, options)
        line = _document_line(facts)
    if is_first_process():
        at = "" if subject.step is None else f"step {subject.step}, "
        line = f"{at}{line}, windows of {subject.window:,} tokens ({subject.where})"
        print(json.dumps(facts) if options.json else line)
    return 0


def _open(options: argparse.Namespace, overrides: Mapping[str, Any], count: int) -> Subject:
    from moejax.generate.load import is_hf_folder
    from moejax.train.compile import enable_cache

    folder = pathlib.Path(options.workdir or options.checkpoint)
    if not is_hf_folder(folder):
        return _open_checkpoint(options, overrides, count)
    from moejax.generate import load

    if not (options.files or options.config or options.multiple_choice):
        raise ConfigError(
            f"{folder} is a model folder, which names no text: give --files=GLOB, or --config=NAME "
            "whose data is meant."
        )
    cfg = apply_overrides(
        load_config(options.config) if options.config else RunConfig(), dict(overrides)
    )
    enable_cache(cfg.compile_cache)
    dtype = cfg.train.compute_dtype
    model = load(folder, mesh=cfg.mesh, dtype=dtype, compute_dtype=dtype)
    if model.tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer: text needs one.")
    window = options.window or (cfg.data.seq_len if options.config else _WINDOW)
    return Subject(model, cfg, model.tokenizer, folder, None, window)


def _open_checkpoint(
    options: argparse.Namespace, overrides: Mapping[str, Any], count: int
) -> Subject:
    from moejax.cli.evaluate import (
        checkpoint_config,
        checkpoint_tokenizer,
        fit_to_devices,
        locate_step,
        model_state,
    )
    from moejax.generate import LanguageModel
    from moejax.partitioning import make_mesh
    from moejax.train.compile import enable_cache
    from moejax.train.run import check_vocabulary
    from moejax.train.state import build_program

    where = locate_step(options)
    cfg, note = fit_to_devices(checkpoint_config(options, where, overrides), count, overrides)
    if note and is_first_process():
        print(note, file=sys.stderr)
    tokenizer = checkpoint_tokenizer(cfg, where)
    check_vocabulary(cfg, tokenizer)
    enable_cache(cfg.compile_cache)
    cfg = cfg.replace(memory=MemoryConfig())  # weights alone have room on the devices
    program = build_program(cfg, make_mesh(cfg.mesh))
    arrays = model_state(program, where)
    model = LanguageModel(
        program.parts, *arrays, program.mesh, tokenizer=tokenizer,
        compute_dtype=cfg.train.compute_dtype,
    )  # fmt: skip
    given = options.config or "data.seq_len" in overrides
    window = options.window or (cfg.data.seq_len if given else own_window(where))
    return Subject(model, cfg, tokenizer, where, int(where.name), window)


def own_window(checkpoint: pathlib.Path) -> int:
    """Tokens that a model is fed at once: the rows it was trained with, of a merged one the run's.

    An import has none: its config says nothing of data but the tokenizer.
    """
    from moejax.checkpoint import read_config

    data = as_run_config(read_config(checkpoint)).data
    plain = DataConfig(tokenizer=data.tokenizer)
    return _WINDOW if int(checkpoint.name) == 0 and data == plain else data.seq_len


def _corpus(options: argparse.Namespace, cfg: RunConfig) -> Corpus:
    from moejax.data import load_corpus

    if not options.files:
        return load_corpus(cfg.data, options.split or "validation")
    files = cfg.data.replace(
        source="files", paths=tuple(options.files), text_field=options.text_field,
        validation_paths=(), mixture=(),
    )  # fmt: skip
    try:
        return load_corpus(files, "all")
    except ConfigError as error:
        named = str(error).replace("data.paths", "--files")
        raise ConfigError(named.replace("data.text_field", "--text-field")) from error


def _documents(
    scorer: Any, subject: Subject, corpus: Corpus, options: argparse.Namespace
) -> dict[str, Any]:
    """Totals of the documents; their own lines go to --per-document."""
    from moejax.cli.generate import write_lines
    from moejax.generate.documents import score_documents, totals
    from moejax.observability.metrics import plain

    with CountBar("windows") as bar:
        found = score_documents(
            scorer, subject.tokenizer, corpus, stride=options.stride or 0, on_progress=bar.update
        )
    if options.per_document:
        write_lines([document.as_json() for document in found], options.per_document)
    facts = totals(found, corpus.num_bytes)
    stride = options.stride or subject.window
    return {k: plain(v) for k, v in facts.items()} | {"window": subject.window, "stride": stride}


def _answers(scorer: Any, subject: Subject, questions: list) -> dict[str, Any]:
    from moejax.generate.choices import answer_questions

    with CountBar("choices") as bar:
        found = answer_questions(scorer, subject.tokenizer, questions, bar.update)
    return {
        "questions": len(questions),
        "accuracy": found.accuracy,
        "accuracy_norm": found.accuracy_norm,
        "window": subject.window,
    }


def _document_line(facts: Mapping[str, Any]) -> str:
    perplexity = facts["perplexity"]
    return (
        f"{facts['documents']:,} documents: loss {facts['loss']:.4f} a token, "
        f"perplexity {'inf' if perplexity is None else f'{perplexity:.4f}'}, "
        f"{facts['bits_per_byte']:.4f} bits and {facts['nats_per_byte']:.4f} nats a byte, over "
        f"{facts['num_tokens']:,} tokens and {facts['num_bytes']:,} bytes"
    )
