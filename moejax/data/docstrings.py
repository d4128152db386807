"""Instruction data that is on every machine: docstrings of Python's standard library.

    python -m moejax.data.docstrings --out=data/docstrings

writes train.jsonl and validation.jsonl, a {"prompt", "completion"} a line: a function without its
docstring, and the docstring's first paragraph.

A model pre-trained on `data.source=stdlib` has read these files. Modules are split as that source
splits them, by the same names and share: what is in validation.jsonl stands in files that
pre-training held out. Modules copy from each other, so a held-out pair is left out where its
paragraph stands in any file of the training split, or its function in train.jsonl.
"""

from __future__ import annotations

import argparse
import ast
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moejax.config import DataConfig
from moejax.data.text_files import stdlib_documents
from moejax.data.tokenize import write_at_once

CUE = "\n# What it does:\n"
# A paragraph of one word says nothing, one of a page is no summary.
_COMPLETION_CHARS = (20, 400)


class Pair(NamedTuple):
    """A function and what it does.

    Attributes:
      module: file and line, relative to the standard library.
      prompt: its source without docstring, and the cue for an answer.
      completion: first paragraph of the docstring, as one line.
    """

    module: str
    prompt: str
    completion: str


def pairs_of(name: str, source: str, max_chars: int) -> Iterator[Pair]:
    """The pairs of one file, in its order; none where it is no Python of this version.

    Args:
      name: of the file.
      source: its text.
      max_chars: functions longer than this are left out.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines(keepends=True)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in sorted(functions, key=lambda node: node.lineno):
        docstring = ast.get_docstring(node)
        if docstring is None or len(node.body) < 2:
            continue
        paragraph = " ".join(docstring.split("\n\n")[0].split())
        code = without_docstring(node, lines)
        least, most = _COMPLETION_CHARS
        if code and least <= len(paragraph) <= most and len(code) <= max_chars:
            yield Pair(f"{name}:{node.lineno}", code + CUE, paragraph)


def without_docstring(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]
) -> str | None:
    """Source of a function without its docstring, at the left margin; None where both share a line.

    Args:
      node: the function; a docstring begins its body.
      lines: of the file, with their ends.
    """
    first, following = node.body[0], node.body[1]
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert first.end_lineno is not None
    if first.lineno <= node.lineno or following.lineno <= first.end_lineno:
        return None
    head = lines[start - 1 : first.lineno - 1]
    body = lines[first.end_lineno : node.end_lineno]
    while body and not body[0].strip():
        body = body[1:]
    return textwrap.dedent("".join([*head, *body]).rstrip() + "\n")


def make_pairs(cfg: DataConfig, max_chars: int) -> dict[str, list[Pair]]:
    """The pairs of both splits; none comes twice, none of validation was seen in training.

    Args:
      cfg: `exclude` and `validation_percent` are read, as for the source `stdlib`.
      max_chars: of a function.
    """
    seen = sorted(stdlib_documents(cfg, "train"))
    train = _first_of(_pairs(seen, max_chars))
    text = "\n".join(" ".join(source.split()) for _, source in seen)
    held_out = _pairs(sorted(stdlib_documents(cfg, "validation")), max_chars)
    unseen = [pair for pair in held_out if pair.prompt not in train and pair.completion not in text]
    return {"train": list(train.values()), "validation": list(_first_of(unseen).values())}


def _first_of(pairs: Iterable[Pair]) -> dict[str, Pair]:
    """Prompt -> its first pair, in order."""
    kept: dict[str, Pair] = {}
    for pair in pairs:
        kept.setdefault(pair.prompt, pair)
    return kept


def _pairs(documents: Iterable[tuple[str, str]], max_chars: int) -> list[Pair]:
    return [pair for name, source in documents for pair in pairs_of(name, source, max_chars)]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes both files and says how many pairs they hold."""
    parser = argparse.ArgumentParser(
        prog="python -m moejax.data.docstrings",
        description="Function -> docstring pairs of Python's standard library, for fine-tuning.",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the two files")
    parser.add_argument(
        "--max-chars", type=int, default=1200, metavar="N", help="longest function (default: 1200)"
    )
    options = parser.parse_args(argv)
    for split, pairs in make_pairs(DataConfig(), options.max_chars).items():
        path = Path(options.out, f"{split}.jsonl")
        rows = (
            {"prompt": pair.prompt, "completion": pair.completion, "module": pair.module}
            for pair in pairs
        )
        write_at_once(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        size = sum(len(pair.prompt) + len(pair.completion) for pair in pairs)
        modules = len({pair.module.rpartition(":")[0] for pair in pairs})
        print(f"{path}: {len(pairs):,} pairs of {modules} modules, {size:,} characters")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
