"""What the backward pass keeps and what it computes again."""

from __future__ import annotations

from collections.abc import Callable

import jax

from moejax.partitioning.expert_exchange import DISPATCHED, RETURNED

POLICIES = ("none", "full", "exchange")


def remat(fn: Callable, policy: str, *, apart: bool = False) -> Callable:
    """`fn` under a rematerialisation policy.

    Args:
      policy: "none" keeps every intermediate; "full" keeps only the layer's inputs and runs it
        again; "exchange" also keeps what came over the wire, so that nothing is sent twice.
      apart: the compiler must not take what both passes compute, gathered weights for one, for the
        same. Two loops are apart already, and there it would only cost.
    """
    if policy == "none":
        return fn
    rule = None
    if policy == "exchange":
        rule = jax.checkpoint_policies.save_only_these_names(DISPATCHED, RETURNED)
    return jax.checkpoint(fn, prevent_cse=apart, policy=rule)
