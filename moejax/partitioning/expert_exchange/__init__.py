"""Ways to bring tokens to their experts and back, behind one function."""

from moejax.partitioning.expert_exchange.api import exchange_experts, resolve_exchange
from moejax.partitioning.expert_exchange.local import ExchangeStats

__all__ = ["ExchangeStats", "exchange_experts", "resolve_exchange"]
