"""Digests of ten training steps under each policy: `python -m tests.memory.policy_bits`.

Run by test_policies in a process of its own, because XLA reads its flags once. Policies change
which results a compiler may fuse with which. It then contracts another product and sum into one
instruction and sums vectors in another order, so that last bits differ although the program says
the same arithmetic. Without either of the two the bits show what the policies themselves do.
"""

from __future__ import annotations

import hashlib
import json
import os

# No fused multiply-add (AVX has none), and no sums in another order (LLVM's vectoriser).
FLAGS = (
    "--xla_force_host_platform_device_count=2", "--xla_cpu_max_isa=AVX",
    "--xla_backend_optimization_level=0",
)  # fmt: skip
STEPS = 10


def digests(changes: dict, steps: int) -> list[str]:
    """A digest a step of loss, gradient norm, weights and optimizer state, to the bit."""
    import jax
    import numpy as np

    from moejax.train.state import init_state
    from moejax.train.step import train_step
    from tests.memory.test_policies import batches_of, program_of

    program = program_of(changes)
    batches, found = batches_of(program.cfg, steps), []
    with jax.set_mesh(program.mesh):
        run = jax.jit(lambda state, batch: train_step(program, state, batch))
        state = init_state(program, 0)
        for step in range(steps):
            state, metrics = run(state, jax.tree.map(lambda a, step=step: a[step], batches))
            digest = hashlib.sha256()
            for leaf in (metrics["loss"], metrics["grad_norm"], *jax.tree.leaves(state)):
                if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                    digest.update(np.asarray(leaf).tobytes())
            found.append(digest.hexdigest())
    return found


def main() -> None:
    """Prints the digests of every policy as JSON."""
    from tests.memory.test_policies import POLICIES

    policies = {
        "none": {"train.remat": "none"}, **POLICIES,
        "auto": {"train.remat": "auto", "swap.budget_gib": 0.01},
        "without dropout": {"train.remat": "none", "lora.dropout": 0.0},
    }  # fmt: skip
    print(json.dumps({name: digests(changes, STEPS) for name, changes in policies.items()}))


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = " ".join(FLAGS)
    os.environ["JAX_PLATFORMS"] = "cpu"
    main()
