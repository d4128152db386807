"""Pairs of functions and docstrings: what a pair is, and that none of validation was seen."""

import ast
import json

import pytest

from moejax.config import DataConfig
from moejax.data import docstrings
from moejax.data.docstrings import CUE, Pair, make_pairs, pairs_of
from moejax.data.text_files import stdlib_documents

SOURCE = '''\
class A:
    @property
    def size(self):
        """The number of
        things in it.

        More.
        """

        # counted
        return len(self.things)

    def short(self):
        """Too short."""
        return 1

    def only(self):
        """Nothing but a docstring is in here."""

    def line(self): "The body shares the line of the def."; return 1

    async def wait(
        self,
        long=3,
    ):
        """Waits until all of it has been said."""
        await self
'''


def test_a_pair_is_a_function_without_its_docstring_and_the_first_paragraph():
    size, wait = pairs_of("a.py", SOURCE, 1000)
    assert size == Pair(
        "a.py:3",
        "@property\ndef size(self):\n    # counted\n    return len(self.things)\n" + CUE,
        "The number of things in it.",
    )
    assert wait.prompt.startswith("async def wait(\n    self,\n    long=3,\n):\n    await self\n")
    assert [pair.module for pair in pairs_of("a.py", SOURCE, 60)] == ["a.py:22"]
    assert not list(pairs_of("a.py", "def broken(:", 1000))


@pytest.fixture(scope="module")
def made():
    return make_pairs(DataConfig(), 600)


def test_validation_is_of_files_that_pre_training_holds_out(made):
    held_out = {name for name, _ in stdlib_documents(DataConfig(), "validation")}
    files = {
        split: {pair.module.rpartition(":")[0] for pair in pairs} for split, pairs in made.items()
    }
    assert files["validation"] <= held_out and not files["train"] & held_out
    assert len(made["train"]) > 2000 and len(made["validation"]) > 50
    text = " ".join(
        " ".join(source.split()) for _, source in stdlib_documents(DataConfig(), "train")
    )
    assert not any(pair.completion in text for pair in made["validation"])
    for pairs in made.values():
        prompts = [pair.prompt for pair in pairs]
        assert len(prompts) == len(set(prompts))
        modules = [pair.module.rpartition(":")[0] for pair in pairs]
        assert modules == sorted(modules)
        for pair in pairs[:100]:
            (function,) = ast.parse(pair.prompt).body
            assert ast.get_docstring(function) is None


def test_the_command_writes_both_files(tmp_path, monkeypatch, capsys):
    few = {"train": [Pair("a.py:1", "p", "c" * 20)], "validation": [Pair("b.py:1", "é", "d" * 20)]}
    monkeypatch.setattr(docstrings, "make_pairs", lambda cfg, max_chars: few)
    assert docstrings.main([f"--out={tmp_path}/new"]) == 0
    row = json.loads((tmp_path / "new" / "validation.jsonl").read_text())
    assert row == {"prompt": "é", "completion": "d" * 20, "module": "b.py:1"}
    assert "train.jsonl: 1 pairs of 1 modules" in capsys.readouterr().out
