"""Config section of what the layers' results become until the backward pass."""

from __future__ import annotations

import dataclasses

from moejax.config.fields import Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapConfig(Section):
    """Results by name, and the budget that train.remat=auto keeps."""

    _path = "swap."
    keep: tuple = setting((), items=str)
    offload: tuple = setting((), items=str)
    budget_gib: float = setting(0.0, ge=0.0)
    host_gib: float = setting(0.0, ge=0.0)
    link_gb_s: float = setting(0.0, ge=0.0)
