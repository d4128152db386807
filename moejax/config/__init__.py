"""Typed, checked configuration (level 0)."""

from moejax.config.fields import (
    ConfigError,
    Section,
    allowed,
    as_dict,
    build_section,
    flat_names,
    nearest,
    unknown_field_message,
)
from moejax.config.model import (
    DsaConfig,
    FfnConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)
from moejax.config.run import (
    MESH_AXES,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    OptimConfig,
    ProfileConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "MESH_AXES",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DsaConfig",
    "EvalConfig",
    "FfnConfig",
    "KdaConfig",
    "LogConfig",
    "MeshConfig",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimConfig",
    "ProfileConfig",
    "RunConfig",
    "Section",
    "TrainConfig",
    "allowed",
    "as_dict",
    "build_section",
    "flat_names",
    "nearest",
    "unknown_field_message",
]
