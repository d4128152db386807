"""`moejax eval` of documents by themselves: runs, imported checkpoints, model folders, answers."""

import json
import math
import re
import shutil

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.cli.conftest import TEXT
from tests.generate.test_scoring import CHOICES
from tests.models.published import FOLDER

FILES = ("--files", f"{TEXT}/function_0.py.txt", f"{TEXT}/function_1.py.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Published weights with a tokenizer of 98 characters beside them."""
    path = tmp_path_factory.mktemp("published") / "deepseek"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / "deepseek_v3" / name, path)
    characters = [*(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "<s>", "</s>"]
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def facts(shown) -> dict:
    assert shown.code == 0 and not shown.err, shown.err
    return json.loads(shown.out)


def test_files_have_the_same_losses_on_every_mesh_and_batch_size(moejax, run_dir, tmp_path):
    found, lines = [], []
    for number, options in enumerate(
        ((), ("--config.eval.batch_size=3", "--config.mesh.fsdp=2", "--config.mesh.expert=4"))
    ):
        out = tmp_path / f"{number}.jsonl"
        options = (*FILES, f"--per-document={out}", "--json", *options)
        found.append(facts(moejax("eval", f"--workdir={run_dir}", *options)))
        lines.append([json.loads(line) for line in out.read_text().splitlines()])
    for name in ("loss", "perplexity", "nats_per_byte", "bits_per_byte"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5)
    for one, other in zip(*lines, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["nats_per_byte"] == pytest.approx(other["nats_per_byte"], rel=1e-5)
    total, first = found[0], lines[0][0]
    sizes = [(TEXT / f"function_{n}.py.txt").stat().st_size for n in (0, 1)]
    assert [line["name"] for line in lines[0]] == ["function_0.py.txt", "function_1.py.txt"]
    assert [line["bytes"] for line in lines[0]] == sizes and total["num_bytes"] == sum(sizes)
    assert first["tokens"] == sizes[0] + 1 and first["scored"] == sizes[0]
    assert total["documents"] == 2 and total["num_tokens"] == sum(sizes)
    assert total["loss"] * total["num_tokens"] == pytest.approx(sum(d["loss"] for d in lines[0]))
    assert total["perplexity"] == pytest.approx(math.exp(total["loss"]))
    assert (total["window"], total["stride"], total["split"]) == (32, 32, None)


def test_a_split_is_packed_unless_asked_for_by_document(moejax, run_dir):
    packed = facts(moejax("eval", f"--workdir={run_dir}", "--json"))
    options = ("--alone", "--stride=20", "--json")
    alone = facts(moejax("eval", f"--workdir={run_dir}", *options))
    assert (alone["window"], alone["stride"]) == (32, 20)
    assert packed["documents"] == alone["documents"] and packed["num_bytes"] == alone["num_bytes"]
    assert alone["num_tokens"] == alone["num_bytes"] > packed["num_tokens"]
    assert packed["bits_per_byte"] == pytest.approx(packed["nats_per_byte"] / math.log(2))
    assert packed["perplexity"] == pytest.approx(math.exp(packed["loss"]))
    assert "window" not in packed and packed["seq_len"] == 32 and alone["split"] == "validation"


def test_a_model_folder_and_its_import_are_the_same(moejax, folder, tmp_path):
    """Behind a begin token every token of the text has a loss; fields of .jsonl by name."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"body": "Hello, world.\\n"}\n{"body": "abc"}\n')
    asked = ("--files", str(texts), "--text-field=body", "--json")
    found = facts(moejax("eval", f"--checkpoint={folder}", *asked))
    assert found["step"] is None and found["window"] == 2048
    assert found["num_tokens"] == found["num_bytes"] + 2 == 14 + 3 + 2
    assert moejax("import-hf", folder, f"--out={tmp_path / 'own'}").code == 0
    again = facts(moejax("eval", f"--workdir={tmp_path / 'own'}", *asked))
    assert again["step"] == 0 and again["window"] == 2048
    assert again["loss"] == pytest.approx(found["loss"], rel=1e-5)


def test_answers_to_questions(moejax, run_dir):
    asked = (f"--multiple-choice={CHOICES}", "--window=128")
    shown = moejax("eval", f"--workdir={run_dir}", *asked)
    found = re.fullmatch(
        r"step 2, 20 questions: accuracy (0\.\d{4}), (0\.\d{4}) with likelihoods divided by length"
        r", windows of 128 tokens \(.*/2\)\n",
        shown.out,
    )
    assert shown.code == 0 and found is not None
    assert all(
        float(share) * 20 == pytest.approx(round(float(share) * 20)) for share in found.groups()
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--files", "/nowhere/*.txt"), "--files: '/nowhere/*.txt' names no file"),
        (("--files", f"{FOLDER}/*/config.json"), ".json is not read"),
        (("--files", "x", "--split=train"), "--files or --split, not both"),
        (("--per-document=/nowhere/x.jsonl",), "/nowhere is not there"),
        (("--multiple-choice=x", "--files", "y"), "--multiple-choice goes without"),
        (("--multiple-choice=/nowhere/x",), "/nowhere/x"),
        (("--alone", "--stride=64"), "stride=64 is not allowed: 1 to 32"),
        (("--alone", "--window=0"), "--window"),
    ],
)
def test_bad_input_is_one_line(moejax, run_dir, options, line):
    done = moejax("eval", f"--workdir={run_dir}", *options)
    assert done.code == 2 and not done.out
    assert line in done.err and done.err.count("\n") == 1


def test_a_model_folder_names_no_text(moejax, folder):
    done = moejax("eval", f"--checkpoint={folder}")
    assert done.code == 2 and "give --files=GLOB" in done.err
    bare = moejax("eval", f"--checkpoint={FOLDER / 'deepseek_v3'}", *FILES)
    assert bare.code == 2 and "has no tokenizer" in bare.err
