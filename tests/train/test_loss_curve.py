"""Losses at random weights are what arithmetic says; the three panels; one-line errors."""

from __future__ import annotations

import json
import math

import pytest
from matplotlib.image import imread

from moejax.config import ConfigError
from moejax.observability.curve_plots import first_at_most, held_out
from moejax.observability.metrics import MetricsLog
from moejax.train.loss_curve import main
from moejax.train.step0 import Step0, k3_shaped, measure, predicted_loss


def test_random_weights_start_where_arithmetic_says():
    """Two layers of K3.1 at width 128: 0.0256 above ln V, which is met to a tenth of that."""
    found = measure(128, tokens=64)
    assert found.vocabulary == 163_840 and found.std == 0.02
    assert found.predicted - math.log(163_840) == pytest.approx(128 * 0.02**2 / 2)
    assert found.measured == pytest.approx(found.predicted, abs=0.0025)
    # One label a token: within four standard errors.
    assert abs(found.drawn - found.measured) < 4 * found.error


def test_the_width_of_k3():
    assert predicted_loss(163_840, 7168, 0.02) == pytest.approx(13.44, abs=0.001)
    model = k3_shaped(7168).model
    assert (model.kda.num_heads, model.kda.head_dim, model.mla.num_heads) == (96, 128, 96)
    assert (model.mla.nope_dim, model.mla.q_latent, model.moe.expert_dim) == (128, 1536, 3072)
    assert model.vocab_size * 16 == 163_840
    narrow = k3_shaped(896).model
    assert (narrow.kda.num_heads, narrow.kda.head_dim, narrow.moe.latent_dim) == (12, 128, 448)
    with pytest.raises(ConfigError, match="a multiple of 64"):
        k3_shaped(100)


@pytest.fixture
def workdirs(tmp_path):
    """Figures of step 0, a run of bytes that passes 1.7 at step 30, and a LoRA run of tokens."""
    start = [Step0(896, 0.02, 163_840, 12.186, 12.186, 12.2, 0.04, 10**7)]
    (tmp_path / "step0.json").write_text(json.dumps([one.__dict__ for one in start]))
    for name, bytes_of_token in (("full", 1.0), ("lora", 4.0)):
        log = MetricsLog(tmp_path / name)
        for step in range(1, 51):
            loss = 4 * math.exp(-step / 40) * (1 if name == "full" else 0.5)
            row = {"loss": loss, "eval_loss": None, "eval_nats_per_byte": None}
            if step % 10 == 0:
                row |= {
                    "eval_loss": loss + 0.1,
                    "eval_nats_per_byte": (loss + 0.1) / bytes_of_token,
                }
            log.write(step, row)
        log.close()
    (tmp_path / "lora" / "config.json").write_text(
        json.dumps({"lora": {"rank": 4}, "init_from": str(tmp_path / "base")})
    )
    (tmp_path / "full" / "config.json").write_text("{}")
    for name in ("base", "full"):
        found = {
            "loss": 1.9,
            "nats_per_byte": 0.5,
            "checkpoint": f"{tmp_path}/{name}/checkpoints/9",
        }
        (tmp_path / f"before_{name}.json").write_text(json.dumps(found))
    return tmp_path


def test_three_panels_and_their_figures(workdirs, capsys):
    out = workdirs / "out" / "losses.png"
    argv = ["--step0", workdirs / "step0.json", "--full", workdirs / "full"]
    argv += [
        "--lora",
        workdirs / "lora",
        "--out",
        out,
        "--target",
        2.0,
        "--before",
        workdirs / "before_base.json",
    ]
    assert main([*map(str, argv)]) == 0
    shown = capsys.readouterr().out
    assert "| 896 | 0.02 | 10,000,000 | 12.186 | 12.186 | 12.20 ± 0.04 |" in shown
    assert "held-out 1.246 nats per byte at step 50, at most 2 from step 30" in shown
    assert (
        "LoRA: validation 1.900 nats per token of the base, 0.673 at step 50; 0.500 and 0.168"
        in shown
    )
    assert main([*map(str, argv[:6])]) == 0
    assert "validation 1.658 nats per token at step 10, 0.673 at" in capsys.readouterr().out
    assert imread(out).shape[:2] == (420, 1200) and out.stat().st_size < 150_000


def test_where_a_loss_is_passed(workdirs):
    _, steps, values = held_out(workdirs / "full")
    assert first_at_most(steps, values, 2.0) == 30
    assert first_at_most(steps, values, 1.0) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--full": "nowhere"}, "no metrics at"),
        ({"--full": "lora"}, "is a run that trains adapters of rank 4"),
        ({"--lora": "full"}, "is a run that trains all weights, no adapters"),
        ({"--before": "before_full.json"}, "but the base of --lora="),
        ({"--lora": "empty"}, "have no held-out loss yet (eval_nats_per_byte)"),
        ({"--step0": "full/metrics.jsonl"}, "holds no figures of this script"),
        ({"--full": None, "--out": "x.png"}, "give --full=WORKDIR and --lora=WORKDIR"),
        ({"--before": "step0.json"}, "is no output of `moejax eval --json`"),
        ({"--before": "nowhere"}, "No such file"),
        ({"--widths": "100"}, "a multiple of 64"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(workdirs, capsys, changes, says):
    log = MetricsLog(workdirs / "empty")
    log.write(1, {"loss": 1.0})
    log.close()
    given = {"--step0": "step0.json", "--full": "full", "--lora": "lora"} | changes
    argv = [
        f"{name}={value if name == '--widths' else workdirs / value}"
        for name, value in given.items() if value
    ]  # fmt: skip
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1
    assert shown.err.startswith("error: ") and says in shown.err
    assert not (workdirs / "x.png").exists()
