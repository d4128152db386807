"""Named cases of linear_xent."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.gate_case import GateCase
from pallas_kernels.linear_xent.api import linear_xent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, meaning and work sizes of one case; the first `ignored` labels do not count."""

    num_rows: int
    width: int
    num_vocab: int
    ignored: int = 0
    options: dict = dataclasses.field(default_factory=dict)
    rows_per_chunk: int | None = None
    vocab_per_chunk: int | None = None
    dtype: str = "float32"

    @property
    def flops(self) -> int:
        """Forward and backward: three products."""
        return 6 * self.num_rows * self.width * self.num_vocab


_ALL = {"label_smoothing": 0.1, "z_loss": 1e-3, "soft_cap": 5.0}

CASES = {
    "one_row": Case(num_rows=1, width=3, num_vocab=5, options=_ALL),
    "whole": Case(num_rows=63, width=8, num_vocab=131, ignored=5),
    "row_by_row": Case(num_rows=13, width=8, num_vocab=37, ignored=2, rows_per_chunk=1),
    "rows_of_7": Case(
        num_rows=63, width=8, num_vocab=37, ignored=9, options=_ALL, rows_per_chunk=7
    ),
    "rows_above_all": Case(num_rows=63, width=8, num_vocab=37, rows_per_chunk=64),
    # the first chunks hold ignored labels only
    "both": Case(
        num_rows=1000,
        width=8,
        num_vocab=131,
        ignored=300,
        options=_ALL,
        rows_per_chunk=128,
        vocab_per_chunk=50,
    ),
    "vocab_of_1": Case(num_rows=9, width=4, num_vocab=5, options=_ALL, vocab_per_chunk=1),
    "vocab_above_all": Case(num_rows=9, width=4, num_vocab=5, vocab_per_chunk=6),
    # more columns than one part of the gradient takes
    "parts": Case(num_rows=3, width=4, num_vocab=9000, options=_ALL),
    "all_ignored": Case(num_rows=20, width=4, num_vocab=11, ignored=20, rows_per_chunk=7),
    "bfloat16": Case(
        num_rows=130,
        width=32,
        num_vocab=257,
        ignored=3,
        options={"z_loss": 1e-3},
        rows_per_chunk=64,
        vocab_per_chunk=100,
        dtype="bfloat16",
    ),
}

# relative root mean square against the reference in float32
TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3}


def make_inputs(case: Case, seed: int = 0, poison: float | None = None):
    """x, weight, labels; rows with ignored labels hold `poison` if given."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (case.num_rows, case.width)).astype(case.dtype)
    weight = jax.random.normal(keys[1], (case.num_vocab, case.width)).astype(case.dtype)
    labels = jax.random.randint(keys[2], (case.num_rows,), 0, case.num_vocab)
    # the ends of the vocabulary are where chunks go wrong
    labels = labels.at[-1].set(case.num_vocab - 1).at[: case.ignored].set(-100)
    if poison is not None:
        x = x.at[: case.ignored].set(poison)
    return x, weight, labels.astype(jnp.int32)


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: K3's and Kimi-Linear's heads, loss and both gradients."""
    if platform != "gpu":
        return []

    def gradients(x, weight, labels):
        loss = lambda x, weight: linear_xent(  # noqa: E731
            x, weight, labels, z_loss=1e-4, impl="pallas_gpu"
        )[0]
        return jax.value_and_grad(loss, argnums=(0, 1))(x, weight)

    cases = []
    for model, width in (("K3", 7168), ("Kimi-Linear", 2304)):
        shape = jax.ShapeDtypeStruct
        args = (
            shape((4096, width), jnp.bfloat16), shape((163_840, width), jnp.bfloat16),
            shape((4096,), jnp.int32),
        )  # fmt: skip
        fn = lambda *a, fn=gradients: fn(*a)  # noqa: E731
        bound = ("xent_stats", "xent_grad")
        cases.append(
            GateCase(f"linear_xent {model}", fn, args, matrix_bound=bound, quick=model == "K3")
        )
    return cases
