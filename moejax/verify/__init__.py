"""A card of checks that anyone can re-run on published weights (level of the planner)."""

from moejax.verify.card import Card, Check, verify

__all__ = ["Card", "Check", "verify"]
