"""Questions with several answers, one of them right: which the model finds most likely."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax.config import ConfigError
from moejax.data import Tokenizer
from moejax.generate.prompts import continuation_row
from moejax.generate.scoring import OnProgress, Scorer


class Question(NamedTuple):
    """A question, what may be answered, and the number of the right answer."""

    question: str
    choices: tuple[str, ...]
    answer: int


class Answers(NamedTuple):
    """What a model chose.

    Attributes:
      accuracy: share of questions whose right answer has the highest log-likelihood.
      accuracy_norm: the same with log-likelihoods divided by the answers' characters.
      log_likelihoods: nats of every choice of every question.
    """

    accuracy: float
    accuracy_norm: float
    log_likelihoods: list[list[float]]


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """The questions of a .jsonl file.

    Each line is {"question": text, "choices": [text, ...], "answer": number of a choice from 0}.

    Raises:
      ConfigError: a line is something else, or there is none.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text (byte {error.start}).") from error
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    questions = [_question(f"{path}, line {n}", line) for n, line in numbered]
    if not questions:
        raise ConfigError(f"{path} holds no question: write one JSON object a line.")
    return questions


def _question(where: str, line: str) -> Question:
    try:
        record: Any = json.loads(line)
        question, choices, answer = record["question"], record["choices"], record["answer"]
        texts = isinstance(question, str) and all(isinstance(c, str) and c for c in choices)
        if not (texts and type(answer) is int and 0 <= answer < len(choices)):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{where}: not a question. Write {{"question": "...", "choices": ["...", "..."], '
            '"answer": 0}, the answer being the number of a choice from 0.'
        ) from error
    return Question(question, tuple(choices), answer)


def answer_questions(
    scorer: Scorer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    on_progress: OnProgress | None = None,
) -> Answers:
    """Scores " " and each choice behind the question's text."""
    rows = [
        continuation_row(tokenizer, question.question, f" {choice}", scorer.max_length)
        for question in questions
        for choice in question.choices
    ]
    found = iter(scorer(rows, on_progress))
    likely = [[-next(found).loss for _ in question.choices] for question in questions]
    plain, by_length = [], []
    for question, values in zip(questions, likely, strict=True):
        lengths = np.array([len(choice) for choice in question.choices])
        plain.append(int(np.argmax(values)) == question.answer)
        by_length.append(int(np.argmax(values / lengths)) == question.answer)
    return Answers(float(np.mean(plain)), float(np.mean(by_length)), likely)
