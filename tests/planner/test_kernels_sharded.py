"""Kernels inside a sharded step see their device's part: no operand is gathered for them."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from moejax.config.load import load_config
from moejax.planner.aot import CompileReport, compile_for
from moejax.planner.hardware import parse_hardware

pytestmark = pytest.mark.aot
NEEDS = {"h200:1x8": "jax_plugins.xla_cuda13", "v5p:2x2x2": "libtpu"}
# Each kind of layer once, KDA and DSA with experts, in widths that kernels of both take.
SHORT = {
    "model.num_layers": 4, "model.attention": "kda,dsa", "model.last_attention": "dsa",
    "model.attn_res_block": 2, "model.dim": 512, "model.vocab_size": 4096,
    "model.kda.num_heads": 4, "model.mla.num_heads": 4, "model.mla.q_latent": 256,
    "model.mla.kv_latent": 256, "model.mla.rope_dim": 64, "model.dsa.num_heads": 4,
    "model.dsa.top_k": 128, "model.dsa.head_dim": 128, "model.moe.num_experts": 16,
    "model.moe.top_k": 4, "model.moe.expert_dim": 256, "model.moe.latent_dim": 256,
    "model.ffn.num_dense_layers": 0, "data.seq_len": 1024, "optim.name": "adamw",
    "optim.qk_clip": 0, "mesh.fsdp": 2, "mesh.expert": 4,
}  # fmt: skip
EVERYWHERE = {"attn_res", "gated_norm", "grouped_matmul", "kda.kda_fused", "lightning_indexer"}
# Rows of 1,024 are longer than chosen keys are masked on an H200, and shorter than on a TPU.
WITH_KERNELS = {
    "h200:1x8": EVERYWHERE | {"indexer_kl", "sparse_flash_attention"},
    "v5p:2x2x2": EVERYWHERE | {"mla_attention"},
}


@functools.cache
def report(hardware: str, impl: str) -> CompileReport:
    if importlib.util.find_spec(NEEDS[hardware]) is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    cfg = load_config("kimi_k31", SHORT | {"kernels.impl": impl})
    return compile_for(cfg, parse_hardware(hardware))


@pytest.mark.parametrize("hardware", NEEDS)
def test_collectives_are_those_of_the_chunked_step(hardware):
    plain, ours = report(hardware, "chunked"), report(hardware, "auto")
    (line,) = [one for one in ours.kernels if one.startswith("operators by pallas")]
    assert set(line.partition(": ")[2].split(", ")) >= WITH_KERNELS[hardware]

    def sent(found: CompileReport) -> dict[tuple[str, str], int]:
        rows: dict[tuple[str, str], int] = {}
        for row in found.collectives:
            rows[row.kind, row.axes] = rows.get((row.kind, row.axes), 0) + row.sent_bytes
        return rows

    before, after = sent(plain), sent(ours)
    # Gathers and sums come and go by a few numbers with what XLA fuses; a gathered operand, a row
    # of tokens by 512 channels in bfloat16 for each device, would be a megabyte at every layer.
    for key in before.keys() | after.keys():
        assert after.get(key, 0) <= 1.02 * before.get(key, 0) + 100_000, key
