"""Ways to bring tokens to their experts and back, behind one function."""

from moejax.partitioning.expert_exchange.api import exchange_experts, resolve_exchange
from moejax.partitioning.expert_exchange.copies import Copies
from moejax.partitioning.expert_exchange.local import ExchangeStats
from moejax.partitioning.expert_exchange.rounds import DISPATCHED, RETURNED

__all__ = [
    "DISPATCHED",
    "RETURNED",
    "Copies",
    "ExchangeStats",
    "exchange_experts",
    "resolve_exchange",
]
