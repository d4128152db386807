"""`train.remat=auto` on the devices of this run: compiled once, then chosen."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from moejax.config import ConfigError, RunConfig
from moejax.memory.swap_core import Plan
from moejax.observability import peak_flops
from moejax.train.batch_shapes import batch_shapes
from moejax.train.compile import compile_once
from moejax.train.memory_plan import budget_of, following, keeping_nothing, plan_memory
from moejax.train.state import abstract_state, build_program
from moejax.train.step import batch_sharding, train_step
from moejax.train.xla_flags import compiler_options


def with_chosen_memory(cfg: RunConfig, mesh: Mesh) -> tuple[RunConfig, Plan | None]:
    """The config with names in place of `auto`, and the plan that they are from.

    Raises:
      ConfigError: the devices do not say what memory they have, or nothing fits.
    """
    if cfg.train.remat != "auto":
        return cfg, None
    device = mesh.devices.flat[0]
    available = (device.memory_stats() or {}).get("bytes_limit", 0)
    if not available and not cfg.swap.budget_gib:
        raise ConfigError(
            f"train.remat=auto needs swap.budget_gib: a {device.device_kind} device does not say "
            "what memory it has. Give it in GiB, or use another train.remat."
        )
    taken = _bytes_of_a_step(keeping_nothing(cfg), mesh)
    rate = peak_flops(device, cfg.train.compute_dtype)[0]
    budget = budget_of(cfg, device.device_kind, available=available, taken=taken, flops=rate)
    plan = plan_memory(build_program(cfg, mesh), budget)
    return following(cfg, plan), plan


def tell_plan(plan: Plan) -> None:
    """Says what was chosen, and how to ask for the same by hand."""
    for one in plan.decisions:
        print(f"  {one.name}: {one.choice} ({one.size / 2**20:.1f} MiB; {one.reason})")
    print(
        f"memory: swap.keep={','.join(plan.names('keep')) or '()'} "
        f"swap.offload={','.join(plan.names('offload')) or '()'} save "
        f"{100 * plan.saved_share:.0f} % of the FLOPs of train.remat=full"
    )


def _bytes_of_a_step(cfg: RunConfig, mesh: Mesh) -> int:
    """Memory of a device that the step of a config takes."""
    program = build_program(cfg, mesh)
    with jax.set_mesh(mesh):
        compiled = compile_once(
            lambda state, batch: train_step(program, state, batch),
            abstract_state(program), batch_shapes(cfg, batch_sharding(program)),
            donate_argnums=0, out_shardings=(program.shardings, None),
            compiler_options=compiler_options(cfg.train.prefetch, mesh),
        )  # fmt: skip
    return compiled.peak_bytes
