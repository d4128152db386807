"""FLOPs of a training token by what they are for."""

from __future__ import annotations

import dataclasses

from moejax.models.flops import attention_flops_per_token, matmul_params_per_token, tower_flops
from moejax.train.memory_plan import recomputed_share
from moejax.train.state import Program


@dataclasses.dataclass(frozen=True)
class Flops:
    """Model FLOPs of a training token, a row's images counted with its tokens.

    Attributes:
      forward: every map and the attention cores.
      backward: gradients of activations, through frozen weights too.
      weights: gradients of the weights that are trained.
      again: the part of the forward pass that remat runs once more, all of it where `auto` has yet
        to choose; no part of the model's FLOPs.
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

    @property
    def carried_out(self) -> float:
        """The model's, and what is run again."""
        return self.model + self.again


def flops_of(program: Program) -> Flops:
    """FLOPs of a token by what they are for; of frozen weights there are no gradients."""
    parts = program.parts
    data = program.cfg.data
    maps = 2.0 * matmul_params_per_token(parts)
    cores = attention_flops_per_token(parts.cfg, data.seq_len)
    trained = 2.0 * matmul_params_per_token(parts, program.trains)
    tower = tower_flops(parts, data.image_patches, program.trains)
    forward = maps + cores + tower.forward / data.seq_len
    backward = maps + 2 * cores + tower.backward / data.seq_len
    again = forward * recomputed_share(program)
    return Flops(forward, backward, trained + tower.weights / data.seq_len, again, 3 * forward)
