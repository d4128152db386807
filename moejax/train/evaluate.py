"""Loss of a split, over whole batches of one shape."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from moejax.data import EvalBatches
from moejax.train.compile import Compiled, compile_once
from moejax.train.state import Program
from moejax.train.step import batch_sharding, eval_step


class EvalResult(NamedTuple):
    """Mean loss of the labels seen, and the same a byte of text."""

    loss: float
    nats_per_byte: float
    num_labels: int


def put_batch(
    program: Program, batch: dict[str, np.ndarray], microbatches: int
) -> dict[str, jax.Array]:
    """A host batch [rows, ...] on the mesh as [microbatches, rows/microbatches, ...]."""
    where = batch_sharding(program)

    def put(array: np.ndarray) -> jax.Array:
        shape = microbatches, len(array) // microbatches, *array.shape[1:]
        return jax.make_array_from_process_local_data(where, array.reshape(shape))

    return {name: put(array) for name, array in batch.items()}


class Evaluator:
    """Compiles the evaluation step at first use and keeps it."""

    def __init__(self, program: Program, batches: EvalBatches):
        self._program, self._batches = program, batches
        self.compiled: Compiled | None = None

    def __call__(self, params: dict, balance: dict) -> EvalResult:
        """The loss with these weights; `eval.batches` limits how much of the split is read."""
        limit, program = self._program.cfg.eval.batches, self._program
        sums, labels = [], []
        for number, host in enumerate(self._batches):
            if limit and number >= limit:
                break
            batch = put_batch(program, host, 1)
            if self.compiled is None:
                with jax.set_mesh(program.mesh):
                    self.compiled = compile_once(
                        lambda p, s, b: eval_step(program, p, s, b), params, balance, batch
                    )
            # One at a time: simulated devices share threads, and batches in a queue take those
            # that a collective of the batch before still needs. 900 batches never ended.
            loss_sum, count = jax.block_until_ready(self.compiled.call(params, balance, batch))
            sums.append(loss_sum)
            labels.append(count)
        total = float(np.sum(jax.device_get(sums), dtype=np.float64))
        count = int(np.sum(jax.device_get(labels)))
        mean = total / max(count, 1)
        return EvalResult(mean, self._batches.nats_per_byte(mean), count)
