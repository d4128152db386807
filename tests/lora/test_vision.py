"""The vision tower frozen, or with adapters."""

import jax
import numpy as np
import pytest

from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.peft_import import lora_config, tree_leaves
from moejax.checkpoint.peft_names import PeftNames
from moejax.checkpoint.peft_packing import LowRank
from moejax.checkpoint.peft_read import PeftFolder
from moejax.checkpoint.peft_run import to_published, tree_path
from moejax.checkpoint.peft_write import write_peft
from moejax.config import ConfigError, LoraConfig
from moejax.lora import linear_maps
from moejax.models.hf_config import FAMILIES
from moejax.models.hf_config_write import family_name
from moejax.models.hf_keys import KIMI_K3
from moejax.models.parts import flat_infos, model_parts
from moejax.train import step
from moejax.train.evaluate import put_batch
from moejax.train.state import build_program, init_state
from tests.sharded.meshes import FSDP8, ONE, mesh_of
from tests.train.test_image_steps import FAST_COMPILE, MODEL, SOME, program_of, rows


def with_lora(targets: tuple[str, ...], **lora):
    cfg = program_of(ONE).cfg
    return cfg.replace(lora=LoraConfig(rank=2, targets=targets, **lora))


def test_every_map_of_a_block_has_its_published_name():
    maps = [one for one in linear_maps(model_parts(MODEL), KIMI_K3) if one.kind == "vision tower"]
    assert [one.name.removeprefix("vision_tower.encoder.blocks.") for one in maps] == [
        f"{block}.{name}" for block in (0, 1) for name in ("wqkv", "wo", "mlp.fc0", "mlp.fc1")
    ]
    assert [(one.in_size, one.out_size) for one in maps[:4]] == [
        (24, 48), (16, 24), (24, 32), (32, 24)
    ]  # fmt: skip
    assert tree_path(maps[4]) == "vision/blocks/lora/wqkv" and maps[4].place == (1,)
    names = PeftNames(model_parts(MODEL), KIMI_K3, "kimi_k3")
    assert names.path(maps[0], memory=True) == maps[0].name
    (place,) = names.places().find("vision_tower.encoder.blocks.1.wo")
    assert place.map == maps[5].name


def test_adapters_of_the_tower_learn_and_nothing_else_does():
    program = build_program(with_lora(("wqkv", "wo", "fc0", "fc1")), mesh_of(ONE))
    assert program.selection is not None and len(program.selection.targets) == 8
    state = init_state(program, 3)
    batch = rows(SOME)

    def both(state, batch):
        """Gradients and the loss."""
        grads, measured = step.gradients(program, state, batch)
        return grads, measured["loss"]

    with jax.set_mesh(program.mesh):
        fn = jax.jit(both, compiler_options=FAST_COMPILE)
        placed = put_batch(program, batch, 1)
        grads, fresh = fn(state, placed)
        params = jax.tree.map(lambda a: a, state.params)
        adapters = params["vision"]["blocks"]["lora"]
        for one in adapters.values():
            one["b"] = one["b"] + 0.5
        _, changed = fn(state._replace(params=params), placed)
    assert set(grads) == {"vision"} and set(grads["vision"]) == {"blocks"}
    for name in ("wqkv", "wo", "fc0", "fc1"):
        own = grads["vision"]["blocks"]["lora"][name]
        # A fresh B is 0, so that nothing reaches A yet.
        assert np.abs(own["b"]).max() > 0 and not np.abs(own["a"]).any()
    base = program_of(ONE)
    whole = init_state(base, 3)._replace(params=without_adapters(state.params))
    with jax.set_mesh(base.mesh):
        plain = jax.jit(
            lambda s, b: step.eval_step(base, s.params, s.balance, b),
            compiler_options=FAST_COMPILE,
        )(whole, placed)
    loss = float(plain[0]) / float(plain[1])
    np.testing.assert_allclose(float(fresh), loss, rtol=1e-6)
    assert abs(float(changed) - loss) > 1e-4


def without_adapters(tree: dict) -> dict:
    return {
        name: without_adapters(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if name != "lora"
    }


def test_adapters_go_to_files_and_back(tmp_path):
    """In the checkpoint's names; transformers has other maps in its tower."""
    parts, rng = model_parts(MODEL), np.random.default_rng(0)
    names = PeftNames(parts, FAMILIES[family_name(MODEL)].spelling, "kimi_k3")
    chosen = [one for one in names.maps.values() if one.kind == "vision tower"]
    low = {
        one.name: LowRank(
            rng.normal(size=(2, one.in_size)).astype(np.float32),
            rng.normal(size=(one.out_size, 2)).astype(np.float32), 4.0,
        )
        for one in chosen
    }  # fmt: skip
    shapes = {name: (2, 4.0) for name in low}
    write_peft(tmp_path / "out", names, shapes, low.__getitem__)
    folder = PeftFolder(tmp_path / "out", names)
    cfg = program_of(ONE).cfg.replace(lora=lora_config(folder, parts))
    leaves = tree_leaves(folder, cfg)
    assert len(leaves) == 8
    for one in chosen:
        a, b = (leaves[f"params/{tree_path(one)}/{side}"][one.place] for side in "ab")
        back = to_published(a, b, one, cfg.lora.scale_of(one.name))
        np.testing.assert_allclose(back.delta(), low[one.name].delta(), rtol=1e-5, atol=1e-5)
    other = PeftNames(parts, FAMILIES[family_name(MODEL)].spelling, "kimi_k25")
    with pytest.raises(CheckpointError, match="--names=checkpoint"):
        write_peft(tmp_path / "other", other, shapes, low.__getitem__)


def test_a_tower_is_frozen_by_naming_the_rest():
    cfg = program_of(ONE, trainable=("stack*", "embed*", "head*", "final*", "vision.projector*"))
    for info, trains in zip(flat_infos(cfg.parts.infos), jax.tree.leaves(cfg.trains), strict=True):
        of_tower = info.name.startswith("vision.") and "projector" not in info.name
        assert trains == (not of_tower), info.name


def test_the_tower_is_stored_in_shares():
    program = program_of(FSDP8)
    stored = program.shardings.params["vision"]
    for leaf, place in (("qkv", 1), ("fc0", 1), ("fc1", 2)):
        assert "fsdp" in stored["blocks"][leaf].spec[place], leaf


def test_what_the_loop_over_blocks_cannot_do_is_said():
    cfg = with_lora((), target_regex=r".*blocks\.0\.wo")
    with pytest.raises(ConfigError, match="'wo' has adapters in 1 of 2"):
        build_program(cfg, mesh_of(ONE))
    with pytest.raises(ConfigError, match="the vision tower has no dropout"):
        build_program(with_lora(("wo",), dropout=0.1), mesh_of(ONE))
