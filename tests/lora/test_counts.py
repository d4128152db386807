"""Packed experts count for what they stand for; a shared A is used once for each chosen expert."""

from moejax.config import LoraConfig, RunConfig
from moejax.lora import adapted_parts
from moejax.models.flops import matmul_params_per_token
from moejax.models.parts import count_by_part, model_parts
from tests.models.small_configs import small

WIDE = {"expert_dim": 32, "latent_dim": 32, "num_experts": 8, "top_k": 3}


def test_packed_experts_count_as_plain_ones():
    plain = model_parts(small("kda", 2, moe=WIDE))
    packed = model_parts(small("kda", 2, moe=WIDE | {"expert_format": "mxfp4"}))
    assert count_by_part(packed) == count_by_part(plain)
    assert matmul_params_per_token(packed) == matmul_params_per_token(plain)


def test_adapters_of_routed_experts_count_for_the_chosen_ones():
    model = small("kda", 2, moe=WIDE)
    for shared in (False, True):
        lora = LoraConfig(
            rank=2, target_parameters=("experts.gate_up_proj", "experts.down_proj"), shared_a=shared
        )
        adapted = adapted_parts(RunConfig(model=model, lora=lora))[0]
        extra = matmul_params_per_token(adapted) - matmul_params_per_token(model_parts(model))
        assert extra == 3 * 2 * ((32 + 64) + (32 + 32))  # chosen x rank x (in + out) of both maps
