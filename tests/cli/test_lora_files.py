"""Adapters through the commands: in from PEFT's form, out again, trained on, merged."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.checkpoint import read_config
from moejax.checkpoint.leaf_reader import LeafReader
from moejax.checkpoint.peft_packing import LowRank
from moejax.checkpoint.peft_run import names_of
from moejax.checkpoint.peft_write import write_peft
from moejax.cli.main import main
from moejax.config.load import as_run_config
from moejax.models.hf_config_write import family_name
from tests.cli.conftest import flags
from tests.models.published import FOLDER

LORA = FOLDER / "lora" / "kimi_linear"
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(run_dir, tmp_path_factory):
    """Adapters of the small run's model in PEFT's form."""
    model = as_run_config(read_config(run_dir)).model
    names = names_of(model, family_name(model))
    rng = np.random.default_rng(0)
    lows = {
        key: LowRank(
            rng.standard_normal((2, one.in_size), np.float32) / 6,
            rng.standard_normal((one.out_size, 2), np.float32), 0.5,
        )
        for key, one in names.maps.items() if one.adapter in ("q_a_proj", "kv_b_proj", "gate_proj")
    }  # fmt: skip
    out = tmp_path_factory.mktemp("adapter") / "file"
    write_peft(out, names, dict.fromkeys(lows, (2, 0.5)), lows.__getitem__)
    return out


@pytest.fixture(scope="module")
def lora_dir(run_dir, adapter, tmp_path_factory):
    """The same as a LoRA run over the small one."""
    workdir = tmp_path_factory.mktemp("lora") / "work"
    assert main(["import-lora", str(adapter), f"--base={run_dir}", f"--out={workdir}"]) == 0
    return workdir


def loss_of(moejax, workdir) -> float:
    shown = moejax("eval", f"--workdir={workdir}", "--json")
    assert shown.code == 0, shown.err
    return json.loads(shown.out)["loss"]


def test_in_and_out_again(moejax, run_dir, adapter, lora_dir, tmp_path):
    assert abs(loss_of(moejax, lora_dir) - loss_of(moejax, run_dir)) > 1e-3
    done = moejax("export-lora", lora_dir, f"--out={tmp_path / 'file'}", "--json")
    assert done.code == 0 and json.loads(done.out)["num_adapters"] == 3
    first, second = (load_file(folder / FILE) for folder in (adapter, tmp_path / "file"))
    assert first.keys() == second.keys()
    assert all(first[key].tobytes() == second[key].tobytes() for key in first)


@pytest.mark.slow
def test_it_is_trained_on(moejax, adapter, lora_dir, tmp_path):
    """The run goes on from the file's values; what comes out then has learned."""
    shutil.copytree(lora_dir, tmp_path / "run")
    fields = [one for one in flags() if "model." not in one and "optim" not in one]
    done = moejax("train", f"--config={lora_dir}", f"--workdir={tmp_path / 'run'}", *fields)
    assert done.code == 0, done.err
    assert "resuming from" in done.out + done.err
    assert moejax("export-lora", tmp_path / "run", f"--out={tmp_path / 'file'}").code == 0
    first, second = (load_file(folder / FILE) for folder in (adapter, tmp_path / "file"))
    for key, value in first.items():
        moved = np.abs(second[key] - value).max()
        assert 0 < moved < 0.1, (key, moved)  # steps of the optimizer, not other adapters


def test_merged_is_evaluated_as_adapted(moejax, run_dir, lora_dir, tmp_path):
    done = moejax("merge-lora", f"--workdir={lora_dir}", f"--out={tmp_path / 'merged'}")
    assert done.code == 0 and "3 adapters merged into 3 matrices" in done.out
    assert abs(loss_of(moejax, tmp_path / "merged") - loss_of(moejax, lora_dir)) <= 1e-6
    base, merged = (
        LeafReader(folder / "checkpoints" / step)
        for folder, step in ((run_dir, "2"), (tmp_path / "merged", "0"))
    )
    changed = {
        name for name in merged.meta["leaves"]
        if merged.read(name).tobytes() != base.read(name).tobytes()
    }  # fmt: skip
    assert {name.rpartition("/")[2] for name in changed} == {"q_a", "k_b", "v_b", "gate_up"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("export-lora",), "give a LoRA run and --out"),
        (("export-lora", "{tmp}", "--out={tmp}/o"), "no checkpoint at {tmp}"),
        (("export-lora", "{run}", "--out={tmp}/o"), "is of a run without adapters (lora.rank=0)"),
        (("import-lora", str(LORA), "--out={tmp}/o"), "give an adapter, --base and --out"),
        (("import-lora", "{tmp}", "--base={run}", "--out={tmp}/o"), "adapter_config.json is"),
        (("import-lora", str(LORA), "--base={run}", "--out={tmp}/o"), "has A [8, 32] and B"),
        (("import-lora", str(LORA), "--base={tmp}/no", "--out={tmp}/o"), "the path does not exist"),
        (("merge-lora", "--out={tmp}/o"), "give --workdir=RUN or --adapter=DIR, and --out"),
        (("merge-lora", f"--adapter={LORA}", "--out={tmp}/o"), "no base: name the model"),
        (("merge-lora", "--workdir={run}", "--out={tmp}/o"), "is of a run without adapters"),
        (("merge-lora", "--out={tmp}/o", "--dtype=x"), "unknown option"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(moejax, run_dir, tmp_path, argv, message):
    words = {"tmp": tmp_path, "run": run_dir}
    shown = moejax(*(word.format_map(words) for word in argv))
    assert shown.code == 2 and not shown.out
    lines = shown.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), shown.err
    assert message.format_map(words) in lines[0]
    assert list(tmp_path.iterdir()) == []
