"""`moejax data prepare`, and runs that read what people have."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.cli.conftest import TEXT, flags

SENTENCES = [f"document {i}: " + "the quick otter greets a lynx. " * (2 + i % 5) for i in range(40)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "text.parquet"
    pyarrow.parquet.write_table(pa.table({"body": SENTENCES}), path, row_group_size=9)
    return path


def source_flags(**fields):
    return [f"--config.data.{name}={value}" for name, value in fields.items()]


def parquet(table):
    return source_flags(source="parquet", paths=f"('{table}',)", text_field="body")


def test_prepare_reports_and_goes_on(moejax, table, tmp_path):
    out = tmp_path / "cache"
    call = ["data", "prepare", "--config=tiny", f"--out={out}", "--workers=0", *parquet(table)]
    first = moejax(*call)
    assert first.code == 0 and first.err == ""
    heads, row, last = first.out.splitlines()
    assert heads.split()[:5] == ["source", "documents", "tokens", "bytes", "tokens/byte"]
    num_bytes = sum(map(len, SENTENCES))
    assert f"{num_bytes:,}" in row and " 40 " in row and str(out) in last
    again = moejax(*call, "--json")
    report = json.loads(again.out)["sources"][0]
    assert report["bytes"] == num_bytes and report["reused"] == 2
    assert json.loads((out / "report.json").read_text())["sources"] == [report]
    other = moejax(*call, "--config.data.text_field=none")
    assert other.code == 2 and "body" in other.err and len(other.err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv, says",
    [
        (["data"], "moejax data prepare"),
        (["data", "make"], "unknown action 'make'"),
        (["data", "prepare", "--config=tiny"], "--out is needed"),
        (["data", "prepare", "--config=tiny", "--out=x", "--workers=-1"], "'-1' is no number"),
        (["data", "prepare", "--out=x"], "--config is needed"),
        (
            ["data", "prepare", "--config=tiny", "--out=x", "--config.data.source=parquet"],
            "data.paths",
        ),
    ],
)
def test_bad_input_is_one_line(moejax, argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = moejax(*argv)
    assert done.code == 2 and says in done.err and len(done.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help(moejax):
    done = moejax("data", "--help")
    assert done.code == 0 and "--workers" in done.out and "report.json" in done.out


def test_config_shows_of_a_mixture_what_was_set(moejax):
    shown = moejax("config", "--config=tiny", "--fields", "--config.data.mixture=[{'name': 'a'}]")
    assert "data.mixture=({'name': 'a'},)" in shown.out


def test_a_run_on_a_mixture_ends_when_the_data_is_used_up(moejax, table, tmp_path):
    """From Parquet and a cache, one epoch: so many steps as their rows, and not one more."""
    cache, workdir = tmp_path / "cache", tmp_path / "run"
    files = source_flags(source="files", paths=f"('{TEXT}/*.txt',)", tokenizer="byte")
    assert (
        moejax("data", "prepare", "--config=tiny", f"--out={cache}", "--workers=0", *files).code
        == 0
    )
    mixture = [
        {"name": "table", "source": "parquet", "paths": [str(table)], "text_field": "body"},
        {"name": "files", "source": "cache", "paths": [str(cache)]},
    ]
    (tmp_path / "mix.json").write_text(json.dumps(mixture))
    call = [
        "train", "--config=tiny", f"--workdir={workdir}",
        *flags(train__num_steps=1000, data__epochs=1, data__batch_size=64),
        f"--config.data.mixture={tmp_path}/mix.json", "--config.eval.every=0",
    ]  # fmt: skip
    done = moejax(*call)
    assert done.code == 0, done.err
    steps = [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").open()]
    assert 2 <= len(steps) == steps[-1] < 20
    assert f"used up after step {steps[-1]}" in done.out
    again = moejax(*call)
    assert again.code == 0 and f"used up after step {steps[-1]}" in again.out
    assert len((workdir / "metrics.jsonl").read_text().splitlines()) == len(steps)
    position = json.loads((workdir / "run.json").read_text())["corpus"]["train"]
    assert position["documents"] > 40
    evaluated = moejax("eval", f"--workdir={workdir}", "--json")
    assert evaluated.code == 0 and json.loads(evaluated.out)["num_tokens"] > 0
    bpe = ("--config.data.tokenizer=bpe", "--config.model.vocab_size=512")
    wrong = moejax(*call, *bpe, f"--workdir={tmp_path}/other")
    assert wrong.code == 2 and "holds tokens, no text" in wrong.err
    assert not (tmp_path / "other").exists()
