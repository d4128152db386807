"""Import and export of a synthetic Hugging Face folder: `python -m moejax.checkpoint.bench`.

Prints MB/s and the peak memory of the process for each way, with the kind of weights. The folder
is Kimi-Linear-shaped, of as many experts as the size asks for; random bytes, a tensor at a time.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

from moejax.checkpoint.hf_export import export_hf
from moejax.checkpoint.hf_folder import HfWriter
from moejax.checkpoint.hf_import import import_hf
from moejax.checkpoint.key_map import KeyMap
from moejax.config import ModelConfig
from moejax.models.hf_config import FAMILIES
from moejax.models.hf_config_write import write_hf_config
from moejax.models.parts import model_parts

_LAYERS, _DIM, _EXPERT_DIM = 9, 1024, 1024


def synthetic_model(gigabytes: float) -> ModelConfig:
    """A Kimi-Linear-shaped model whose bfloat16 weights are about so large."""
    base = ModelConfig()
    moe_layers = _LAYERS - 1
    experts = max(8, round(gigabytes * 1e9 / (2 * 3 * _DIM * _EXPERT_DIM * moe_layers)))
    return base.replace(
        name="synthetic", dim=_DIM, num_layers=_LAYERS, vocab_size=32768, attn_res_block=0,
        attention="kda,kda,kda,mla", last_attention="mla",
        kda=base.kda.replace(
            num_heads=16, head_dim=64, value_head_dim=64, gate="softplus", output_gate="low_rank",
            decay_rank=64, output_gate_rank=64,
        ),
        mla=base.mla.replace(
            num_heads=16, q_latent=0, kv_latent=256, nope_dim=64, rope_dim=32, value_dim=64,
            output_gate="none",
        ),
        ffn=base.ffn.replace(dim=4096, activation="swiglu"),
        moe=base.moe.replace(
            num_experts=experts, top_k=8, expert_dim=_EXPERT_DIM, latent_dim=0, latent_norm=False,
            num_shared=1, balance="none",
        ),
    )  # fmt: skip


def write_synthetic(cfg: ModelConfig, out: pathlib.Path) -> int:
    """A folder of random weights in bfloat16 (float32 where the format has it); returns bytes."""
    raw = write_hf_config(cfg)
    keys = KeyMap(model_parts(cfg), FAMILIES[raw["model_type"]].spelling)
    plan = [(e.name, "F32" if e.float32 else "BF16", e.shape) for e in keys.entries.values()]
    rng = np.random.default_rng(0)
    with HfWriter(out, plan) as writer:
        for name, dtype, shape in plan:
            halves = rng.integers(0x3C00, 0x3D00, int(np.prod(shape)), np.uint16)
            values = halves.astype(np.uint32) << 16 if dtype == "F32" else halves
            writer.add(name, values.tobytes())
        writer.write_json("config.json", raw)
    return sum(int(np.prod(s)) * (4 if d == "F32" else 2) for _, d, s in plan)


def _measure(what: str, src: str, out: str) -> None:
    """One conversion, alone in this process, as a line of JSON."""
    began = time.perf_counter()
    if what == "import":
        size = import_hf(src, out).source_bytes
    else:
        size = export_hf(src, out).total_bytes
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = {"what": what, "bytes": size, "seconds": seconds, "peak_bytes": peak}
    print(json.dumps(facts))


def main() -> None:
    """Writes the folder, converts it there and back, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--folder", default=None, help="where (default: a temporary folder)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        _measure(*options.measure)
        return
    folder = pathlib.Path(tempfile.mkdtemp(prefix="moejax-bench-", dir=options.folder))
    try:
        cfg = synthetic_model(options.gigabytes)
        size = write_synthetic(cfg, folder / "hf")
        print(f"{size / 1e9:.2f} GB, {cfg.moe.num_experts} experts in {_LAYERS - 1} layers")
        for what, src, out in (("import", "hf", "run"), ("export", "run", "back")):
            argv = [sys.executable, "-m", "moejax.checkpoint.bench", "--measure", what]
            done = subprocess.run(
                [*argv, str(folder / src), str(folder / out)], check=True, capture_output=True
            )
            facts = json.loads(done.stdout.splitlines()[-1])
            speed = facts["bytes"] / 1e6 / facts["seconds"]
            print(
                f"{what}: {facts['seconds']:.1f} s, {speed:.0f} MB/s, peak memory "
                f"{facts['peak_bytes'] / 1e9:.2f} GB"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
