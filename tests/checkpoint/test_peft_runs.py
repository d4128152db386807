"""Adapters in and out of LoRA runs, and folded into bases: the oracle's numbers, every bit kept."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.checkpoint import CheckpointError
from moejax.checkpoint.base import fingerprint
from moejax.checkpoint.hf_export import export_hf
from moejax.checkpoint.hf_import import import_hf
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.layout import named_leaves
from moejax.checkpoint.leaf_reader import LeafReader
from moejax.checkpoint.merge import merge_lora
from moejax.checkpoint.peft_export import export_lora
from moejax.checkpoint.peft_names import PeftNames
from moejax.checkpoint.peft_packing import LowRank
from moejax.checkpoint.peft_read import PeftFolder
from moejax.checkpoint.peft_run import RunAdapters, to_published, tree_path
from moejax.checkpoint.peft_write import write_peft
from moejax.config import MeshConfig
from moejax.generate.load import load
from moejax.train.import_lora import import_lora
from tests.models.published import FOLDER
from tests.models.running import FAST_COMPILE, forward

LORA = FOLDER / "lora" / "kimi_linear"
TENSORS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The oracle: its base as published and imported, its adapter as a run."""
    folder = tmp_path_factory.mktemp("oracle")
    (folder / "base").mkdir()
    shutil.copy(LORA / "config.json", folder / "base")
    shutil.copy(LORA / "base_model.safetensors", folder / "base" / "model.safetensors")
    import_hf(folder / "base", folder / "import")
    import_lora(LORA, folder / "base", folder / "run")
    return folder


@pytest.fixture(scope="module")
def case():
    with np.load(LORA / "cases.npz") as file:
        return dict(file)


def rows_of(case) -> dict[str, np.ndarray]:
    tokens = case["input_ids"].astype(np.int32)
    labels = np.concatenate([tokens[:, 1:], np.full((1, 1), -100, np.int32)], 1)
    return {"tokens": tokens, "segment_ids": np.ones_like(tokens), "labels": labels}


@pytest.fixture(scope="module")
def step(place, case):
    """The run's model, and one compiled pass of it: mean loss and logits, with gradients.

    In float64, so that what differs is the values of weights and not the order of sums.
    """
    model = load(place / "run", mesh=MeshConfig())
    rows = rows_of(case)

    def objective(params, balance):
        batch = jax.tree.map(jnp.asarray, rows)
        logits, loss_B, _ = forward(model.parts, params, balance, batch, jnp.float64)
        return loss_B.sum() / (rows["tokens"].size - 1), logits

    compiled = jax.jit(jax.value_and_grad(objective, has_aux=True), compiler_options=FAST_COMPILE)

    def call(params):
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, model.balance))
            return jax.tree.map(np.asarray, compiled(*wide))

    return model, call


@pytest.fixture(scope="module")
def adapted(step):
    """Loss, logits and gradients of the run."""
    model, call = step
    (loss, logits), grads = call(model.params)
    return loss, logits, grads


def leaves_of(workdir) -> dict[str, np.ndarray]:
    reader = LeafReader(workdir / "checkpoints" / "0")
    return {name: reader.read(name) for name in reader.meta["leaves"]}


def test_logits_and_loss_are_those_of_peft(adapted, case):
    loss, logits, _ = adapted
    assert np.abs(logits - case["lora_logits"]).max() <= 2e-4
    assert abs(loss - case["loss"]) <= 1e-5
    assert np.abs(case["lora_logits"] - case["base_logits"]).max() > 1


def test_gradients_are_those_of_peft(adapted, place, tmp_path):
    """Turned and packed as the file's tensors are, every one within 1e-3."""
    adapters, grads = RunAdapters(place / "run"), named_leaves(adapted[2])

    def read(name: str) -> LowRank:
        one = adapters.names.maps[name]
        a, b = (np.asarray(grads[f"{tree_path(one)}/{side}"])[one.place] for side in "ab")
        return to_published(a, b, one, 2.0)

    shapes = {name: (8, 2.0) for name in adapters.maps()}
    write_peft(tmp_path / "grads", adapters.names, shapes, read)
    got, want = (
        load_file(tmp_path / "grads" / TENSORS),
        load_file(LORA / "adapter_grads.safetensors"),
    )
    assert got.keys() == want.keys()
    for key, value in want.items():
        off = np.linalg.norm(got[key] - value) / max(np.linalg.norm(value), 1e-5)
        assert off <= 1e-3, (key, off)


def test_merged_equals_adapted(adapted, step, place, case, tmp_path):
    """Over the published folder and over its import, by file and by run: one model, the same."""
    report = merge_lora(tmp_path / "out", adapter=LORA, base=place / "base")
    assert (report.num_adapters, report.num_changed) == (31, 27 - 4 + 4 * 8 * 3)
    got = leaves_of(tmp_path / "out")
    merge_lora(tmp_path / "of_import", adapter=LORA, base=place / "import")
    merge_lora(tmp_path / "of_run", run=place / "run")
    for other in ("of_import", "of_run"):
        for name, value in leaves_of(tmp_path / other).items():
            assert value.tobytes() == got[name].tobytes(), (other, name)
    model, call = step
    params = jax.tree.map(np.zeros_like, model.params)  # adapters of 0 over the merged weights
    for name, value in got.items():
        if name.startswith("params/"):
            *path, last = name.split("/")[1:]
            functools.reduce(dict.__getitem__, path, params)[last] = value
    (_, logits), _ = call(params)
    assert np.abs(logits - adapted[1]).max() <= 1e-5 * np.abs(logits).max()
    assert np.abs(logits - case["merged_logits"]).max() <= 2e-4
    export_hf(tmp_path / "out", tmp_path / "hf")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    for key, want in load_file(LORA / "merged_changed_weights.safetensors").items():
        np.testing.assert_allclose(after[key], want, atol=1e-6, rtol=0, err_msg=key)
    before = load_file(place / "base" / "model.safetensors")
    changed = {key for key in before if after[key].tobytes() != before[key].tobytes()}
    assert len(changed) == report.num_changed
    words = ("q_proj", "k_proj", "b_proj", "gate_proj", ".experts.")
    assert all(any(word in key for word in words) for key in changed)


def test_out_again_it_is_the_same_file(place, tmp_path):
    report = export_lora(place / "run", tmp_path / "out")
    assert report.file.num_adapters == 31 and report.names == "transformers"
    got, want = load_file(tmp_path / "out" / TENSORS), load_file(LORA / TENSORS)
    assert got.keys() == want.keys()
    assert all(got[key].tobytes() == want[key].tobytes() for key in want)
    raw = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert raw["base_model_name_or_path"] == str(place / "base")


def k3(tmp_path, name="k3_text"):
    """K3's names, and adapters of three ranks and scales on half the maps, experts among them."""
    source = HfSource(FOLDER / name)
    names = PeftNames(source.parts, source.map.spelling, "kimi_k3")
    rng = np.random.default_rng(0)
    lows = {}
    for key, one in names.maps.items():
        if rng.random() < 0.5 or one.num_experts:
            rank, scale = int(rng.integers(1, 4)), float(rng.choice([0.5, 1.0, 3.0]))
            lead = (one.num_experts,) if one.num_experts else ()
            a = rng.standard_normal((*lead, rank, one.in_size)).astype(np.float32)
            b = rng.standard_normal((*lead, one.out_size, rank)).astype(np.float32) / 4
            lows[key] = LowRank(a, b, scale)
    shapes = {key: (low.rank, low.scale) for key, low in lows.items()}
    write_peft(tmp_path / "adapter", names, shapes, lows.__getitem__)
    return names, lows


def test_ranks_and_scales_of_neighbours_in_a_scan(tmp_path):
    """Zeros fill the smaller ranks, B takes up the scale: the same changes, and trimmed again."""
    names, lows = k3(tmp_path)
    report = import_lora(tmp_path / "adapter", FOLDER / "k3_text", tmp_path / "run")
    assert "filled with zeros to the rank of other layers" in report.notes[0]
    adapters = RunAdapters(tmp_path / "run")
    assert adapters.maps() == list(lows)
    for key, low in lows.items():
        got = adapters.read(key)
        assert got.rank == low.rank, key
        for e in range(len(low.a)) if low.a.ndim == 3 else (None,):
            np.testing.assert_allclose(got.delta(e), low.delta(e), rtol=1e-5, atol=1e-5)
    export_lora(tmp_path / "run", tmp_path / "again")
    again = PeftFolder(tmp_path / "again", names)
    assert again.maps() == list(lows)
    assert all(again.read(key).rank == low.rank for key, low in lows.items())


@pytest.mark.slow
def test_a_narrow_base_is_rounded_once(tmp_path):
    """bfloat16 leaves: float32 sums rounded at the end; whatever has no adapter keeps its bits."""
    names, lows = k3(tmp_path)
    import_hf(FOLDER / "k3_text", tmp_path / "base", dtype="bfloat16")
    merge_lora(tmp_path / "out", adapter=tmp_path / "adapter", base=tmp_path / "base")
    for folder in ("base", "out"):
        export_hf(
            tmp_path / folder, tmp_path / f"hf_{folder}", dtype="bfloat16", experts="bfloat16"
        )
    before, after = (HfSource(tmp_path / f"hf_{folder}") for folder in ("base", "out"))
    words, changed = {}, 0
    for key in lows:
        one = names.maps[key]
        if not one.num_experts:
            words[f"{key}.weight"] = lows[key].delta()
            continue
        for half, word in enumerate(names.expert_words(one)):
            for e in range(one.num_experts):
                rows = np.split(np.arange(one.out_size), len(names.expert_words(one)))[half]
                path = names.expert_path(one, e, word)
                words[f"{path}.weight"] = lows[key].delta(e)[rows]
    for key in before.tensors:
        old, new = before.folder.read(key), after.folder.read(key)
        if key in words:
            want = (old.astype(np.float32) + words[key]).astype(ml_dtypes.bfloat16)
            assert (new == want).mean() > 0.999, key  # sums of products differ in their last bit
            wide = (x.astype(np.float32) for x in (new, want))
            np.testing.assert_allclose(*wide, rtol=2.0**-7, err_msg=key)
            changed += 1
        else:
            assert new.tobytes() == old.tobytes(), key
    assert changed == len(words)
    assert any("routed_expert_norm" in key for key in before.tensors)


@pytest.mark.slow
def test_packed_experts_stay_packed_or_are_unpacked(tmp_path):
    """A base in MXFP4: bytes kept where experts have no adapter, bfloat16 where they have."""
    names, lows = k3(tmp_path, "k3_mxfp4")
    import_hf(FOLDER / "k3_mxfp4", tmp_path / "packed", experts="packed")
    import_hf(FOLDER / "k3_mxfp4", tmp_path / "plain", dtype="auto")
    for base in ("packed", "plain"):
        out = tmp_path / f"of_{base}"
        merge_lora(out, adapter=tmp_path / "adapter", base=tmp_path / base)
    got, want = leaves_of(tmp_path / "of_packed"), leaves_of(tmp_path / "of_plain")
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].dtype == value.dtype and got[key].tobytes() == value.tobytes(), key
    config = json.loads((tmp_path / "of_packed" / "config.json").read_text())
    assert config["model"]["moe"]["expert_format"] == "plain"
    apart = {key: low for key, low in lows.items() if not names.maps[key].num_experts}
    shapes = {key: (low.rank, low.scale) for key, low in apart.items()}
    write_peft(tmp_path / "apart", names, shapes, apart.__getitem__)
    merge_lora(tmp_path / "still", adapter=tmp_path / "apart", base=tmp_path / "packed")
    got, base = leaves_of(tmp_path / "still"), leaves_of(tmp_path / "packed")
    experts = [key for key in base if "/ffn/experts/" in key]
    assert experts and {base[key].dtype for key in experts} == {np.dtype(np.uint8)}
    assert all(got[key].tobytes() == base[key].tobytes() for key in experts)


def test_a_base_is_recognised_in_other_types(place):
    """Read narrower than it was trained on, or wider; another one is refused in either."""
    base = HfSource(place / "base")
    name = "stack0/run0/attn/q"
    leaf = base.load_leaf(name, jax.ShapeDtypeStruct(base.map.leaves[name].shape, np.float32))
    for trained, found in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)):
        marks = fingerprint({name: leaf.astype(trained)})
        assert fingerprint({name: leaf.astype(found)}, marks) == marks
        assert fingerprint({name: (leaf + 1).astype(found)}, marks) != marks
    assert load(place / "run", mesh=MeshConfig(), dtype="bfloat16").params


def test_what_cannot_be_merged_or_imported(place, tmp_path):
    with pytest.raises(CheckpointError, match="either a LoRA run or an adapter"):
        merge_lora(tmp_path / "out")
    with pytest.raises(CheckpointError, match="no base: name the model"):
        merge_lora(tmp_path / "out", adapter=LORA)
    with pytest.raises(CheckpointError, match="holds adapters .* Merge them first"):
        merge_lora(tmp_path / "out", adapter=LORA, base=place / "run")
    with pytest.raises(CheckpointError, match="holds adapters .* Merge them first"):
        import_lora(LORA, place / "run", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"without adapters \(lora.rank=0\)"):
        export_lora(place / "import", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is no linear map of this deepseek_v3 model"):
        merge_lora(tmp_path / "out", adapter=LORA, base=FOLDER / "deepseek_v3")
    with pytest.raises(CheckpointError, match="was trained over another base: .* has other values"):
        merge_lora(tmp_path / "out", run=place / "run", base=FOLDER / "kimi_linear")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for make in (
        lambda out: merge_lora(out, adapter=LORA, base=place / "base"),
        lambda out: import_lora(LORA, place / "base", out),
        lambda out: export_lora(place / "run", out),
    ):
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            make(tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
