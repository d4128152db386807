"""`moejax finetune`: from weights and a file of conversations to a run, with defaults that can be
seen and changed; what is missing is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moejax.cli.finetune import finetune_config, with_steps
from moejax.cli.main import main
from moejax.config.load import load_config
from moejax.data.tokenize import train_bpe


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """64 conversations that are easy to learn: every answer is the same."""
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = ({"prompt": f"{n}?", "completion": "yes"} for n in range(64))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def tuned(chats, run_dir, tmp_path_factory) -> Path:
    """The workdir of a fine-tuning run of 12 steps over the run's own config."""
    workdir = tmp_path_factory.mktemp("tuned") / "run"
    argv = ["finetune", f"--init-from={run_dir}", f"--data={chats}", f"--workdir={workdir}",
            "--config.train.num_steps=12", "--config.optim.lr=0.01", "--config.optim.adam_lr=0.01",
            "--config.optim.schedule=constant"]  # fmt: skip
    assert main(argv) == 0
    return workdir


def config_of(*argv: str):
    from moejax.cli.finetune import _parser

    return finetune_config(*_parser().parse(argv))


def test_the_loss_of_what_is_learned_falls(tuned):
    rows = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 12 and losses[-1] < 0.5 * losses[0]


def test_a_second_call_says_that_it_is_finished(moejax, tuned, chats, run_dir):
    again = moejax(
        "finetune", f"--init-from={run_dir}", f"--data={chats}", f"--workdir={tuned}",
        "--config.train.num_steps=12",
    )  # fmt: skip
    assert again.code == 0 and "is finished: step 12" in again.out
    shown = moejax("eval", f"--workdir={tuned}", "--json")
    facts = json.loads(shown.out)
    assert facts["split"] == "validation" and facts["num_tokens"] > 0


def test_show_tells_the_data_and_trains_nothing(moejax, chats, run_dir):
    shown = moejax(
        "finetune", f"--init-from={run_dir}", f"--data={chats}", f"--validation={chats}", "--show"
    )
    assert shown.code == 0 and not shown.err
    assert "conversations: 64, 64 prompts and completions as they are written" in shown.out
    assert "0?>>>yes<|endoftext|><<<" in shown.out
    assert "256 are learned (" in shown.out  # three letters and the end, of each
    # 64 conversations of 6 or 7 tokens in rows of 32, 3 epochs, 8 rows a step.
    assert "training all parameters" in shown.out and "3 epochs" in shown.out
    assert "6 steps of 8 rows of 32 tokens" in shown.out


def test_a_bad_line_is_named_and_nothing_is_written(moejax, chats, run_dir, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(chats.read_text() + '{"messages": [{"role": "user", "content": "x"}]}\n')
    refused = moejax(
        "finetune", f"--init-from={run_dir}", f"--data={bad}", f"--workdir={tmp_path}/run"
    )
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert f"error: {bad}:65: no message of the role 'assistant'" in refused.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ((), "--init-from is needed"),
        (("--config=tiny", "--data=x.jsonl"), "--init-from is needed"),
        (("--config=tiny", "--init-from=nowhere"), "--init-from=nowhere does not exist"),
        (("--config=tiny", "--init-from=launch"), "--data is needed"),
        (("--config=tiny", "--init-from=launch", "--data=x"), "launch has no tokenizer beside"),
        (("--init-from=launch", "--data=x.jsonl"), "--config is needed"),
        (("--config=tiny", "--config.data.tokenizer=byte", "--init-from=launch",
          "--data=x.jsonl"),
         "--workdir is needed"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line(moejax, argv, reason):
    refused = moejax("finetune", *argv)
    assert refused.code == 2 and reason in refused.err and refused.err.count("\n") == 1


def test_defaults_and_what_the_user_says(run_dir):
    base = load_config(run_dir)
    full = config_of(f"--init-from={run_dir}", "--data=a.jsonl", "--data=b.jsonl")
    assert full.data.source == "chat" and full.data.paths == ("a.jsonl", "b.jsonl")
    assert full.init_from == str(run_dir) and full.model == base.model
    assert full.optim.lr == pytest.approx(0.1 * base.optim.lr) and full.data.epochs == 3
    assert full.optim.name == base.optim.name
    adapters = config_of(
        f"--init-from={run_dir}", "--data=a.jsonl", "--config.lora.rank=4",
        "--config.lora.targets=('q_proj',)", "--config.optim.weight_decay=0.2",
    )  # fmt: skip
    assert (adapters.optim.name, adapters.optim.lr) == ("adamw", 1e-3)
    assert adapters.lora.rank == 4 and adapters.optim.weight_decay == 0.2
    steps = config_of(f"--init-from={run_dir}", "--data=a.jsonl", "--config.train.num_steps=7")
    assert (steps.data.epochs, steps.train.num_steps) == (0, 7)
    ready = with_steps(full, 100, {"eval.every": "9"})
    assert ready.train.num_steps == 38  # 300 rows, 8 a step
    assert ready.checkpoint.every == 8 and ready.eval.every == full.eval.every
    step = sorted((run_dir / "checkpoints").glob("[0-9]*"))[-1]
    assert config_of(f"--init-from={step}", "--data=a.jsonl").init_from == str(step)


def test_the_tokenizer_is_that_of_the_weights(tmp_path):
    """A trained one lies in the run's folder; none is trained on the conversations."""
    train_bpe(["some text"], 258, tmp_path / "run" / "tokenizer.json")
    step = tmp_path / "run" / "checkpoints" / "3"
    step.mkdir(parents=True)
    for start in (tmp_path / "run", step):
        cfg = config_of("--config=tiny", f"--init-from={start}", "--data=a.jsonl")
        assert cfg.data.tokenizer == str(tmp_path / "run" / "tokenizer.json")
