"""FLOPs of a training token by what they are for."""

from __future__ import annotations

import dataclasses

from moejax.models.flops import attention_flops_per_token, matmul_params_per_token
from moejax.train.state import Program


@dataclasses.dataclass(frozen=True)
class Flops:
    """Model FLOPs of a training token.

    Attributes:
      forward: every map and the attention cores.
      backward: gradients of activations, through frozen weights too.
      weights: gradients of the weights that are trained.
      again: the forward pass that remat runs once more; no part of the model's FLOPs.
      all_trained: forward and backward if every weight were trained.
    """

    forward: float
    backward: float
    weights: float
    again: float
    all_trained: float

    @property
    def model(self) -> float:
        """What `moejax compile` calls FLOPs a token."""
        return self.forward + self.backward + self.weights


def flops_of(program: Program) -> Flops:
    """FLOPs of a token by what they are for; of frozen weights there are no gradients."""
    parts = program.parts
    maps = 2.0 * matmul_params_per_token(parts)
    cores = attention_flops_per_token(parts.cfg, program.cfg.data.seq_len)
    trained = 2.0 * matmul_params_per_token(parts, program.trains)
    again = 0.0 if program.cfg.train.remat == "none" else maps + cores
    return Flops(maps + cores, maps + 2 * cores, trained, again, 3 * (maps + cores))
