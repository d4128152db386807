"""permute and unpermute as one kernel each way: every row is read once and written once.

A program has a few tokens and goes through their slots. A token's row is read once for all its
copies; a copy goes straight to its sorted row, which no other token has.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.permute.plan import PermutePlan
from pallas_kernels.permute.tiles import Tiles, tiles_for


def permute(x_ML, plan):
    """Copies of tokens in sorted rows."""
    _refuse(x_ML)
    return _permute(x_ML, plan)


def unpermute(rows_RL, weights_MA, plan):
    """Each token's A rows, weighted and summed in float32."""
    _refuse(rows_RL, weights_MA)
    return _unpermute(rows_RL, weights_MA, plan)


def _refuse(*arrays) -> None:
    if any(a.dtype == jnp.float64 for a in arrays):
        raise NotImplementedError("float64 has no kernel")
    if any(0 in a.shape for a in arrays):
        raise NotImplementedError("an empty array needs no kernel")


@jax.custom_vjp
def _permute(x_ML, plan):
    return _copy(x_ML, plan)


def _permute_fwd(x_ML, plan):
    return _permute(x_ML, plan), plan


def _permute_bwd(plan, d_rows_RL):
    return _sum_of_slots(d_rows_RL, None, plan), None


_permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def _unpermute(rows_RL, weights_MA, plan):
    return _sum_of_slots(rows_RL, weights_MA, plan)


def _unpermute_fwd(rows_RL, weights_MA, plan):
    return _unpermute(rows_RL, weights_MA, plan), (rows_RL, weights_MA, plan)


def _unpermute_bwd(residuals, d_out_ML):
    rows_RL, weights_MA, plan = residuals
    return *_weighted_copy(d_out_ML, rows_RL, weights_MA, plan), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


def _num_real(plan: PermutePlan):
    """[1], rows that belong to an expert; those behind may hold anything."""
    return jnp.sum(plan.group_sizes, dtype=jnp.int32)[None]


def _sum_of_slots(rows_RL, weights_MA, plan):
    """Per token the (weighted) sum of its A rows; slots without an expert count 0."""
    (num_tokens, num_slots), width = plan.positions.shape, rows_RL.shape[1]
    part = _Part(tiles_for(num_tokens, width), num_tokens, num_slots, width)
    given = [_num_real(plan), plan.positions.reshape(-1), rows_RL]
    if weights_MA is not None:
        given.append(weights_MA.astype(jnp.float32).reshape(-1))
    out = jax.ShapeDtypeStruct((num_tokens, width), rows_RL.dtype)
    return part.call(_sum_body, "sum_of_slots", part.num_columns, given, out)


def _sum_body(part, num_real_ref, positions_ref, rows_ref, *refs):
    *weights_ref, out_ref = refs
    columns, inside_ml = part.columns(part.column)
    sum_ml = jnp.zeros(inside_ml.shape, jnp.float32)
    for slot in range(part.num_slots):
        position_m, is_real_m = part.slot(positions_ref, slot, num_real_ref[0])
        row_ml = _gpu.load_rows(rows_ref, position_m, inside_ml & is_real_m[:, None], columns)
        row_ml = row_ml.astype(jnp.float32)
        if weights_ref:
            row_ml = row_ml * part.of_slot(weights_ref[0], slot)[:, None]
        sum_ml += row_ml
    _gpu.store_rows(out_ref, part.tokens(), sum_ml, inside_ml, columns)


def _copy(x_ML, plan):
    """Every token's row to its sorted rows; 0 behind the last group."""
    (num_tokens, num_slots), width = plan.positions.shape, x_ML.shape[1]
    part = _Part(tiles_for(num_tokens, width), num_tokens, num_slots, width)
    given = [_num_real(plan), plan.positions.reshape(-1), x_ML]
    out = jax.ShapeDtypeStruct((plan.order.shape[0], width), x_ML.dtype)
    return part.call(_copy_body, "copy_to_slots", part.num_columns, given, out)


def _copy_body(part, num_real_ref, positions_ref, x_ref, out_ref):
    columns, inside_ml = part.columns(part.column)
    x_ml = _gpu.load_rows(x_ref, part.tokens(), inside_ml, columns)
    for slot in range(part.num_slots):
        position_m, is_real_m = part.slot(positions_ref, slot, num_real_ref[0])
        _gpu.store_rows(out_ref, position_m, x_ml, inside_ml & is_real_m[:, None], columns)
    part.clear(out_ref, num_real_ref[0], part.column)


def _weighted_copy(d_out_ML, rows_RL, weights_MA, plan):
    """d_rows, and the dot of each token's d_out with its rows: both gradients of unpermute."""
    (num_tokens, num_slots), width = plan.positions.shape, rows_RL.shape[1]
    tiles = tiles_for(num_tokens, width)
    tiles = tiles._replace(tokens=tiles.gradient_tokens)
    part = _Part(tiles, num_tokens, num_slots, width)
    weights = weights_MA.astype(jnp.float32).reshape(-1)
    given = [_num_real(plan), plan.positions.reshape(-1), d_out_ML, rows_RL, weights]
    out = [
        jax.ShapeDtypeStruct(rows_RL.shape, rows_RL.dtype),
        jax.ShapeDtypeStruct(weights.shape, weights_MA.dtype),
    ]
    # a dot is over a whole row: here one program has all its columns
    d_rows_RL, dots = part.call(_gradient_body, "unpermute_grad", 1, given, out)
    return d_rows_RL, dots.reshape(weights_MA.shape)


def _gradient_body(
    part, num_real_ref, positions_ref, d_out_ref, rows_ref, weights_ref, d_rows_ref, dots_ref
):
    num_real = num_real_ref[0]

    def column(c, dots_Am):
        columns, inside_ml = part.columns(c)
        d_out_ml = _gpu.load_rows(d_out_ref, part.tokens(), inside_ml, columns).astype(jnp.float32)
        sums_Am = []
        for slot, dot_m in enumerate(dots_Am):
            position_m, is_real_m = part.slot(positions_ref, slot, num_real)
            where_ml = inside_ml & is_real_m[:, None]
            row_ml = _gpu.load_rows(rows_ref, position_m, where_ml, columns).astype(jnp.float32)
            sums_Am.append(dot_m + jnp.sum(d_out_ml * row_ml, axis=1))
            d_row_ml = d_out_ml * part.of_slot(weights_ref, slot)[:, None]
            _gpu.store_rows(d_rows_ref, position_m, d_row_ml, where_ml, columns)
        part.clear(d_rows_ref, num_real, c)
        return sums_Am

    dots_Am = [jnp.zeros(part.tiles.tokens, jnp.float32)] * part.num_slots
    dots_Am = lax.fori_loop(0, part.num_columns, column, dots_Am)
    for slot, dot_m in enumerate(dots_Am):
        _gpu.store(dots_ref.at[part.flat(slot)], dot_m, part.are_tokens())


class _Part(NamedTuple):
    """What a program has of the tokens, of their slots and of the columns."""

    tiles: Tiles
    num_tokens: int
    num_slots: int
    width: int
    # which tokens and which columns are this program's; asked once, as an interpreted loop cannot
    program: Any = None
    column: Any = None

    @property
    def num_programs(self) -> int:
        return pl.cdiv(self.num_tokens, self.tiles.tokens)

    @property
    def num_columns(self) -> int:
        return pl.cdiv(self.width, self.tiles.columns)

    def call(self, body, name, share, given, out):
        """Runs `body`, with `share` programs for the columns of the same tokens, side by side."""

        def one(*refs):
            program = pl.program_id(0)
            body(self._replace(program=program // share, column=program % share), *refs)

        whole = lambda a: pl.BlockSpec(a.shape, lambda *_: (0,) * len(a.shape))  # noqa: E731
        return _gpu.call(
            one, name=name, grid=(self.num_programs * share,), in_specs=[whole(a) for a in given],
            out_specs=jax.tree.map(whole, out), out_shape=out, warps=self.tiles.warps,
        )(*given)  # fmt: skip

    def tokens(self):
        """Tokens of this program, [m]."""
        first = self.program * self.tiles.tokens
        return first + jnp.arange(self.tiles.tokens, dtype=jnp.int32)

    def are_tokens(self):
        return self.tokens() < self.num_tokens

    def columns(self, c):
        """Part c of the columns, and [m, l] where there are such tokens and columns."""
        start = c * self.tiles.columns
        inside_ml = jnp.broadcast_to(
            self.are_tokens()[:, None], (self.tiles.tokens, self.tiles.columns)
        )
        if self.width % self.tiles.columns:
            column_l = start + jnp.arange(self.tiles.columns, dtype=jnp.int32)
            inside_ml &= (column_l < self.width)[None, :]
        return (start, self.tiles.columns), inside_ml

    def flat(self, slot):
        return self.tokens() * self.num_slots + slot

    def of_slot(self, ref, slot):
        """Weight of the tokens' slot."""
        return _gpu.load(ref.at[self.flat(slot)], self.are_tokens())

    def slot(self, positions_ref, slot, num_real):
        """Sorted row of the tokens' slot, and whether it belongs to an expert."""
        position_m = self.of_slot(positions_ref, slot)
        return position_m, self.are_tokens() & (position_m < num_real)

    def clear(self, out_ref, num_real, c):
        """Zeros in this program's share of the rows behind the last group."""
        num_rows, some = out_ref.shape[0], self.tiles.tokens
        share = pl.cdiv(num_rows, self.num_programs)
        first = self.program * share
        last = jnp.minimum(first + share, num_rows)
        columns, _ = self.columns(c)
        column_l = columns[0] + jnp.arange(columns[1], dtype=jnp.int32)

        def clear_some(i, _):
            row_m = i * some + jnp.arange(some, dtype=jnp.int32)
            mine_m = (row_m >= jnp.maximum(first, num_real)) & (row_m < last)
            where_ml = mine_m[:, None] & (column_l < self.width)[None, :]
            zeros_ml = jnp.zeros(where_ml.shape, out_ref.dtype)
            _gpu.store_rows(out_ref, row_m, zeros_ml, where_ml, columns)

        start = jnp.maximum(first, num_real) // some
        lax.fori_loop(start, pl.cdiv(last, some), clear_some, None)
