"""What is trained here loads in the families' own code: the extra `parity` (torch, transformers).

Not part of the usual run: `./launch/test.sh -m parity tests/parity` in an environment that has
`pip install moejax[parity]`.
"""

import dataclasses
import json

import numpy as np
import pytest

from moejax.checkpoint.hf_export import export_hf
from moejax.checkpoint.hf_import import import_hf
from moejax.config import MeshConfig, RunConfig, as_dict
from moejax.config.load import as_run_config
from moejax.generate.load import load
from moejax.train import train
from tests.models.published import FOLDER

pytestmark = pytest.mark.parity
FAMILIES = ("kimi_linear", "deepseek_v3", "deepseek_v32")


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tmp_path_factory):
    """Five steps from a published checkpoint, exported in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    import_hf(FOLDER / request.param, folder / "import")
    model = load(folder / "import", mesh=MeshConfig()).config
    base = as_dict(RunConfig())
    cfg = as_run_config(base).replace(
        model=model.replace(dsa=model.dsa.replace(stage="frozen")),
        init_from=str(folder / "import"),
    )
    changes = {
        "data.source": "synthetic", "data.tokenizer": str(word_tokenizer(folder)),
        "data.seq_len": 64, "data.batch_size": 8, "train.num_steps": 5, "optim.name": "adamw",
        "optim.lr": 1e-3, "eval.every": 0, "log.progress": False, "log.tensorboard": False,
    }  # fmt: skip
    result = train(dataclasses.replace(cfg), folder / "run", changes)
    assert result.step == 5
    export_hf(folder / "run", folder / "export", dtype="float32")
    return request.param, folder


def word_tokenizer(folder):
    """A tokenizer of 100 words: the tiny models know 128 tokens."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocab = {"<|endoftext|>": 0, "<unk>": 1} | {chr(33 + i): i + 2 for i in range(90)}
    hf = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    hf.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    hf.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_transformers_gives_the_same_logits(trained):
    name, folder = trained
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "export", dtype=torch.float32, attn_implementation="eager",
        output_loading_info=True,
    )  # fmt: skip
    assert not report["missing_keys"] and not report["mismatched_keys"]
    theirs.eval()
    tokens = np.random.default_rng(0).integers(0, 100, (2, 65))
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)).logits.float().numpy()
    ours = load(folder / "run", mesh=MeshConfig())
    got = np.asarray(ours.logits(tokens))
    assert np.abs(got - want).max() <= 2e-4, name
    before = np.asarray(load(folder / "import", mesh=MeshConfig()).logits(tokens))
    assert np.abs(got - before).max() > 1e-2  # it did learn something
    config = json.loads((folder / "export" / "config.json").read_text())
    assert config["model_type"] == name
