"""The config section of the vision tower."""

from __future__ import annotations

import dataclasses

from moejax.config.fields import ConfigError, Section, setting

MERGE = 2  # patches a side that become one token, in every published tower


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(Section):
    """The tower that turns images into embeddings of the text stream; off without layers."""

    _path = "model.vision."
    num_layers: int = setting(0, ge=0)
    dim: int = setting(64, ge=1)
    num_heads: int = setting(4, ge=1)
    head_dim: int = setting(16, ge=4)
    mlp_dim: int = setting(128, ge=1)
    patch: int = setting(14, ge=1)
    grid: int = setting(64, ge=1)
    grid_resize: str = setting("bilinear", choices=("bilinear", "bicubic"))
    max_frames: int = setting(4, ge=1)
    norm: str = setting("rms", choices=("rms", "layer"))
    norm_eps: float = setting(2.0**-23, gt=0.0)
    biases: bool = setting(False)
    projector_norm: str = setting("after", choices=("after", "before"))
    projector_eps: float = setting(1e-5, gt=0.0)
    pad_token: int = setting(0, ge=0)
    max_patches: int = setting(65536, ge=4)
    max_side: int = setting(512, ge=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 4:
            below = self.head_dim // 4 * 4
            raise ConfigError(
                f"model.vision.head_dim={self.head_dim} is no multiple of 4: rows and columns "
                f"rotate pairs in turn. Use {below} or {below + 4}."
            )
