"""Optimizers, parameter groups and schedules (level 5)."""

from moejax.optim.adamw import global_norm
from moejax.optim.build import build_optimizer, state_shardings
from moejax.optim.ema import ema_params
from moejax.optim.groups import ParamGroup, assign_groups
from moejax.optim.muon import newton_schulz
from moejax.optim.qk_clip import clip_key, clip_query, qk_clip_factors
from moejax.optim.schedule import make_schedule

__all__ = [
    "ParamGroup",
    "assign_groups",
    "build_optimizer",
    "clip_key",
    "clip_query",
    "ema_params",
    "global_norm",
    "make_schedule",
    "newton_schulz",
    "qk_clip_factors",
    "state_shardings",
]
