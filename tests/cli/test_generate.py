"""`moejax generate`: streamed text, files of prompts, and what is refused in one line."""

import json

import pytest

from tests.models.published import FOLDER


@pytest.fixture(scope="module")
def trained(run_dir):
    """A run of two steps: it continues with whatever, but always the same."""
    return (f"--checkpoint={run_dir}",)


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_is_streamed_and_a_file_gives_the_same_text(moejax, trained, tmp_path):
    options = (*trained, "--max-new-tokens=12", "--temperature=1.5", "--seed=3")
    shown = moejax("generate", *options, "--prompt=def ")
    assert shown.code == 0 and not shown.err and shown.out.endswith("\n")
    assert len(shown.out) > 1
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("def \n\nclass Café\n", encoding="utf-8")
    done = moejax("generate", *options, f"--prompts-file={prompts}", f"--output={out}")
    assert (done.code, done.out, done.err) == (0, "", "")
    first, second = lines_of(out.read_text(encoding="utf-8"))
    assert first["text"] + "\n" == shown.out
    assert (first["prompt"], second["prompt"]) == ("def ", "class Café")
    assert {first["finish"], second["finish"]} <= {"length", "stop"}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_prompts_in_json_lines_and_a_stop_text(moejax, trained, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a\\nb"}\n{"prompt": ""}\n', encoding="utf-8")
    options = (*trained, f"--prompts-file={prompts}", "--max-new-tokens=10")
    free = lines_of(moejax("generate", *options).out)
    assert free[0]["prompt"] == "a\nb" and free[1]["prompt"] == ""
    stop = free[0]["text"][2]
    token = free[1]["tokens"][0]
    ended = lines_of(moejax("generate", *options, f"--stop={stop}", f"--stop-token={token}").out)
    assert ended[0]["text"] == free[0]["text"].split(stop)[0]
    assert ended[0]["finish"] == "stop"
    assert (ended[1]["text"], ended[1]["tokens"], ended[1]["finish"]) == ("", [], "stop")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), "--checkpoint is needed"),
        (("--checkpoint=X",), "give one of --prompt=TEXT and --prompts-file"),
        (("--checkpoint=X", "--prompt=a", "--prompts-file=b"), "give one of --prompt"),
        (("--checkpoint=X", "--prompt=a", "--output=b"), "--output goes with --prompts-file"),
        (("--checkpoint=/nowhere/x", "--prompt=a"), "/nowhere/x"),
        (("--checkpoint=X", "--prompts-file=/nowhere/p"), "/nowhere/p"),
        (("--checkpoint=X", "--prompt=a", "--config.model.dim=3"), "--config.model.dim changes"),
        (("--checkpoint=X", "--prompt=a", "--config.mesh.fsdp=3"), "mesh fsdp=3 does not fit"),
        (("--checkpoint=X", "--prompt=a", "--top-p=2"), "top_p=2.0 is not allowed"),
        (("--checkpoint=X", "--prompt=a", "--temperature=warm"), "--temperature"),
        (("--checkpoint=X", "--prompt=a", "--max-new-tokens=0"), "--max-new-tokens"),
        (("--checkpoint=X", "--prompt=a", "--promt=b"), "nearest: --prompt"),
    ],
)
def test_bad_input_is_one_line(moejax, options, line):
    done = moejax("generate", *options)
    assert done.code == 2 and not done.out
    assert line in done.err and done.err.count("\n") == 1


def test_a_bad_file_of_prompts_is_one_line(moejax, trained, tmp_path):
    for name, content, line in (
        ("empty.txt", b"\n \n", "holds no prompt"),
        ("bytes.txt", b"a\xff", "is no UTF-8 text (byte 1)"),
        ("a.jsonl", b'{"prompt": "a"}\n{"text": 1}\n', "line 2: no JSON object"),
    ):
        (tmp_path / name).write_bytes(content)
        done = moejax("generate", *trained, f"--prompts-file={tmp_path / name}")
        assert done.code == 2 and line in done.err and done.err.count("\n") == 1


def test_weights_without_a_tokenizer_generate_no_text(moejax):
    done = moejax("generate", f"--checkpoint={FOLDER / 'deepseek_v3'}", "--prompt=a")
    assert done.code == 2 and "has no tokenizer" in done.err
