"""Typed, checked configuration (level 0)."""

from moejax.config.data import DataConfig, EvalConfig, SourceConfig, SourceFields
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
from moejax.config.lora import LoraConfig
from moejax.config.memory import MemoryConfig
from moejax.config.mesh import MESH_AXES, MeshConfig
from moejax.config.model import (
    DsaConfig,
    FfnConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)
from moejax.config.run import RunConfig, check_asked
from moejax.config.swap import SwapConfig
from moejax.config.training import (
    CheckpointConfig,
    KernelsConfig,
    LogConfig,
    OptimConfig,
    PlacementConfig,
    ProfileConfig,
    SamplesConfig,
    TrainConfig,
)
from moejax.config.vision import VisionConfig

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
    "LoraConfig",
    "MemoryConfig",
    "MeshConfig",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimConfig",
    "PlacementConfig",
    "KernelsConfig",
    "ProfileConfig",
    "RunConfig",
    "SamplesConfig",
    "Section",
    "SourceConfig",
    "SwapConfig",
    "SourceFields",
    "TrainConfig",
    "VisionConfig",
    "allowed",
    "as_dict",
    "build_section",
    "check_asked",
    "flat_names",
    "nearest",
    "unknown_field_message",
]
