"""The card on a published checkpoint: every check holds; and what does not is said."""

import json

import numpy as np
import pytest

from moejax.cli.main import main
from moejax.config import ConfigError
from moejax.verify import verify
from tests.models.published import FOLDER

SOURCE = FOLDER / "deepseek_v3"
LATE = ("train step", "save, resume", "export trained")


def test_every_check_holds(tmp_path, capsys):
    argv = [str(SOURCE), f"--reference={SOURCE / 'cases.npz'}", f"--json={tmp_path / 'card.json'}"]
    assert main(["verify", *argv, f"--folder={tmp_path}"]) == 0
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["passed"] and len(card["checks"]) == 9
    assert {check["outcome"] for check in card["checks"]} == {"ok"}
    facts = {check["name"]: check["facts"] for check in card["checks"]}
    assert facts["keys"]["values"] == 73_816 and facts["logits"]["cases"]["b_"]["max_abs"] < 2e-4
    assert facts["train step"]["loss"] > 0 and not facts["save, resume"]["next_step_differing"]
    assert [p.name for p in tmp_path.iterdir()] == ["card.json"]
    assert "every check holds" in capsys.readouterr().out


@pytest.mark.parametrize("routing", ["free", "pinned"])
def test_other_logits_fail_the_card(routing, tmp_path):
    case = dict(np.load(SOURCE / "cases.npz"))
    wrong = {k.removeprefix("a_"): v for k, v in case.items() if k.startswith("a_")}
    wrong["logits"] = wrong["logits"] + 0.01
    np.savez(tmp_path / "wrong.npz", **wrong)
    card = verify(SOURCE, reference=tmp_path / "wrong.npz", routing=routing, skip=LATE)
    outcomes = {check.name: check.outcome for check in card.checks}
    assert not card.passed and outcomes["logits"] == "failed" and outcomes["export"] == "ok"
    assert [outcomes[name] for name in LATE] == ["skipped"] * 3


def test_a_family_that_is_not_ours_ends_the_card(tmp_path):
    given = json.loads((FOLDER / "only_shapes" / "qwen3_next.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given["config"]))
    (tmp_path / "model.safetensors").write_bytes((SOURCE / "model.safetensors").read_bytes())
    card = verify(tmp_path)
    assert [check.outcome for check in card.checks] == ["failed"]
    assert "decoder_sparse_step" in card.checks[0].line


def test_bad_requests_are_one_line(tmp_path):
    np.savez(tmp_path / "empty.npz", x=np.zeros(3))
    with pytest.raises(ConfigError, match="has no case: it needs input_ids and logits"):
        verify(SOURCE, reference=tmp_path / "empty.npz")
    with pytest.raises(ConfigError, match="no check is called 'nothing'"):
        verify(SOURCE, skip=["nothing"])
