"""What images cost a step, counted by hand."""

import pytest

from moejax.config import DataConfig
from moejax.config.load import load_config
from moejax.models.flops import matmul_params_per_token, tower_flops, train_flops_per_token
from moejax.models.parts import model_parts
from moejax.planner.aot import abstract_arguments
from moejax.planner.tower import tower_of
from moejax.train.state import build_program
from tests.sharded.meshes import FSDP8, ONE, mesh_of
from tests.train.test_image_steps import MODEL, program_of


def test_flops_of_moonvit_by_hand():
    """Four images of 4,096 patches: 27 layers of 4 x 1024 x 1536 + 2 x 1024 x 4096 weights."""
    cfg = load_config("kimi_k31_vision_lora")
    assert cfg.data.image_patches == 4 * 4 * 1024
    parts = model_parts(cfg.model)
    block = 4 * 1024 * 1536 + 2 * 1024 * 4096
    maps = 27 * block + 3 * 14 * 14 * 1024 + (4096 * 4096 + 4096 * 7168) / 4
    cores = 27 * 4 * 12 * 128 * 4096
    found = tower_flops(parts, 16384)
    assert found.forward == pytest.approx(16384 * (2 * maps + cores), rel=1e-12)
    assert found.weights == pytest.approx(16384 * 2 * maps, rel=1e-12)
    # A token is multiplied with no weight of the tower.
    blind = model_parts(load_config("kimi_k31_lora").model)
    assert matmul_params_per_token(parts) == matmul_params_per_token(blind)
    extra = train_flops_per_token(parts, 8192, None, 16384) - train_flops_per_token(parts, 8192)
    assert extra == pytest.approx(found.total / 8192, rel=1e-9)


def test_a_frozen_tower_has_no_backward():
    program = program_of(ONE, trainable=("stack*",))
    found = tower_flops(program.parts, 32, program.trains)
    assert found.backward == found.weights == 0 < found.forward
    assert tower_flops(program.parts, 0).total == 0


def test_the_report_of_a_program():
    program = program_of(FSDP8)
    tower = tower_of(program)
    assert tower.patches == 32 and 0 < tower.share < 1
    vision = MODEL.vision
    # uint8 pixels, ids, four numbers of places, and where features stand in 24 tokens.
    assert tower.batch_bytes == 32 * (3 * vision.patch**2 + 4 + 16) + 4 * 24
    assert tower.feature_bytes == 8 * 32 * 4
    assert tower.stored_bytes < tower.weight_bytes / 4
    _, batch = abstract_arguments(program)
    assert batch["pixels"].shape == (1, 8, 32, 3, 4, 4) and batch["pixels"].dtype == "uint8"
    assert batch["pixels"].sharding.shard_shape(batch["pixels"].shape)[1] == 1
    blind = build_program(program.cfg.replace(data=DataConfig(batch_size=8)), mesh_of(FSDP8))
    assert tower_of(blind) is None and len(abstract_arguments(blind)[1]) == 3
