"""Config section of what lies in host memory."""

from __future__ import annotations

import dataclasses

from moejax.config.fields import Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section):
    """Which parts of the state live in host memory and visit the devices layer by layer."""

    _path = "memory."
    optimizer: str = setting("device", choices=("device", "host"))
    master: str = setting("device", choices=("device", "host"))
    frozen: str = setting("device", choices=("device", "host"))
    loss_gib: float = setting(0.0, ge=0.0)

    @property
    def loss_bytes(self) -> int:
        """Bound of the loss's temporaries on a device, 0 = none."""
        return int(self.loss_gib * 2**30)
