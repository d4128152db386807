"""The results that a backward pass may find kept: one list of names, and the tag that gives them.

A layer tags what may be kept, ``tag(rows, QKV)``; a policy alone says keep, offload or recompute
(`moejax.memory.policy`). What a name weighs, bytes and recomputed FLOPs of a token, is read from a
trace of the layer (`moejax.memory.graph`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from moejax.config import ConfigError, nearest
from moejax.partitioning.expert_exchange import DISPATCHED, RETURNED
from pallas_kernels.saved import ATTENDED

KDA_QKV = "kda_qkv"
KDA_DECAY = "kda_decay"
KDA_GATE = "kda_gate"
MLA_LATENTS = "mla_latents"
MLA_QUERIES = "mla_queries"
MLA_GATE = "mla_gate"
INDEX = "indexer_maps"
CHOSEN_KEYS = "chosen_keys"
ATTENTION_OUT = "attention_out"
ROUTER = "moe_router"
LATENT = "moe_latent"
EXPERT_HIDDEN = "moe_expert_hidden"
EXPERT_OUT = "moe_expert_out"
GLU_GATE_UP = "glu_gate_up"


class Result(NamedTuple):
    """A result that a layer tags.

    Attributes:
      name: its tag.
      kind: matmul, grouped, kernel or exchange.
      what: in words.
    """

    name: str
    kind: str
    what: str


RESULTS: tuple[Result, ...] = (
    Result(KDA_QKV, "matmul", "queries, keys and values of KDA"),
    Result(KDA_DECAY, "matmul", "decay of KDA, before its gate function"),
    Result(KDA_GATE, "matmul", "output gate of KDA"),
    Result(MLA_LATENTS, "matmul", "query and key-value latents of MLA, before their norms"),
    Result(MLA_QUERIES, "matmul", "queries of MLA, all heads"),
    Result(MLA_GATE, "matmul", "output gate of MLA"),
    Result(INDEX, "matmul", "queries, keys and weights of the lightning indexer"),
    Result(CHOSEN_KEYS, "kernel", "keys that the lightning indexer chose"),
    Result(ATTENDED, "kernel", "softmax attention: output and log-sum-exp"),
    Result(ATTENTION_OUT, "matmul", "output map of either attention"),
    Result(ROUTER, "matmul", "router logits"),
    Result(LATENT, "matmul", "tokens on the experts' width"),
    Result(DISPATCHED, "exchange", "rows that arrived at their experts"),
    Result(EXPERT_HIDDEN, "grouped", "experts' gated inner rows"),
    Result(EXPERT_OUT, "grouped", "experts' output rows"),
    Result(RETURNED, "exchange", "rows that came back from their experts"),
    Result(GLU_GATE_UP, "matmul", "gate and up of a dense or shared feed-forward"),
)
KNOWN: dict[str, Result] = {one.name: one for one in RESULTS}


def tag(x: jax.Array, name: str) -> jax.Array:
    """`x`, known to policies by `name`.

    Raises:
      ValueError: the name is not in the list.
    """
    if name not in KNOWN:
        raise ValueError(f"{name!r} is no name of a result; known are {', '.join(KNOWN)}.")
    return checkpoint_name(x, name)


def check_names(field: str, given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuses names that nothing carries.

    Args:
      field: config field that holds them.
      given: the names.
      known: those that there are.
      where: whose they are: "moejax", "the model".
    Raises:
      ConfigError: one is not among the known.
    """
    known = list(known)
    for name in given:
        if name not in known:
            near = nearest(name, known, count=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"{field} has {name!r}, which no result of {where} is called.{hint} "
                f"Known: {', '.join(known)}."
            )
