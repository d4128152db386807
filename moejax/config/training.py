"""Config sections of the optimizer, the loop, and what a run does beside its steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

from moejax.config.fields import ConfigError, Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """Optimizer, groups, schedule."""

    _path = "optim."
    name: str = setting("muon", choices=("muon", "adamw"))
    lr: float = setting(2e-2, gt=0.0)
    adam_lr: float = setting(4e-3, gt=0.0)
    weight_decay: float = setting(0.1, ge=0.0)
    muon_momentum: float = setting(0.95, ge=0.0, lt=1.0)
    muon_steps: int = setting(5, ge=1, le=20)
    muon_per_head: bool = setting(True)
    adam_b1: float = setting(0.9, ge=0.0, lt=1.0)
    adam_b2: float = setting(0.95, ge=0.0, lt=1.0)
    adam_eps: float = setting(1e-8, gt=0.0)
    no_decay: tuple = setting(("norm", "a_log", "dt_bias", "conv", "attn_res", "bias"), items=str)
    groups: tuple = setting(())
    schedule: str = setting("cosine", choices=("cosine", "wsd", "constant"))
    warmup_fraction: float = setting(0.02, ge=0.0, le=1.0)
    min_ratio: float = setting(0.1, ge=0.0, le=1.0)
    decay_fraction: float = setting(0.2, ge=0.0, le=1.0)
    decay_start: int = setting(-1, ge=-1)
    clip_norm: float = setting(1.0, ge=0.0)
    ema_decay: float = setting(0.0, ge=0.0, lt=1.0)
    qk_clip: float = setting(0.0, ge=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for entry in self.groups:
            _check_group(entry)


def _check_group(entry: Any) -> None:
    """One entry of optim.groups; what its regex matches only a model can tell."""
    try:
        pattern, lr_scale, weight_decay = entry
        lr_scale, weight_decay = float(lr_scale), float(weight_decay)
        if not isinstance(pattern, str):
            raise TypeError(pattern)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optim.groups has {entry!r}; an entry is (regex, lr_scale, weight_decay or -1), "
            "as in (('router', 0.5, -1),)."
        ) from error
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"optim.groups has {entry!r}, but {pattern!r} is no regular expression: {error}."
        ) from error
    decay_ok = weight_decay == -1 or 0 <= weight_decay < math.inf
    if not (0 <= lr_scale < math.inf and decay_ok):
        raise ConfigError(
            f"optim.groups has {entry!r}; lr_scale must be >= 0, weight_decay >= 0 or -1."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """The loop and the step."""

    _path = "train."
    num_steps: int = setting(400, ge=1)
    accumulation: int = setting(1, ge=1)
    accum_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    rows_per_device: int = setting(0, ge=0)
    compute_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    remat: str = setting("none", choices=("none", "full", "dots", "exchange", "auto"))
    rows_per_chunk: int = setting(0, ge=0)
    vocab_per_chunk: int = setting(0, ge=0)
    z_loss: float = setting(0.0, ge=0.0)
    stop_at: int = setting(-1, ge=-1)
    trainable: tuple = setting((), items=str)
    frozen_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    self_check: str = setting("auto", choices=("auto", "on", "off"))
    prefetch: str = setting("within", choices=("off", "within", "ahead"))
    bad_step: str = setting("stop", choices=("stop", "skip", "rewind"))
    bad_step_limit: int = setting(10, ge=1)
    spike_factor: float = setting(0.0, ge=0.0)
    spike_window: int = setting(50, ge=2)
    watchdog_s: float = setting(90.0, ge=0.0)
    check_every: int = setting(0, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.spike_factor <= 1:
            raise ConfigError(
                f"train.spike_factor={self.spike_factor:g} would call every other step bad: it is "
                "a multiple of the median loss. Use a value above 1, such as 2, or 0 for off."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesConfig(Section):
    """Text that the model continues as it learns."""

    _path = "samples."
    prompts: tuple = setting((), items=str)
    every: int = setting(100, ge=0)
    max_new_tokens: int = setting(64, ge=1)
    temperature: float = setting(0.0, ge=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When to save and what to keep."""

    _path = "checkpoint."
    every: int = setting(100, ge=0)
    keep: int = setting(3, ge=1)
    keep_every: int = setting(0, ge=0)
    keep_best: bool = setting(True)
    asynchronous: bool = setting(True)
    dir: str = setting("")
    local_every: int = setting(0, ge=0)
    local_dir: str = setting("")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "://" in self.dir and not self.dir.startswith("gs://"):
            raise ConfigError(
                f"checkpoint.dir={self.dir!r}: Orbax writes to gs:// and to folders, to no other "
                "store. Mount the bucket (mountpoint-s3, s3fs) and name the folder."
            )
        if bool(self.local_every) != bool(self.local_dir):
            raise ConfigError(
                f"checkpoint.local_every={self.local_every} and checkpoint.local_dir="
                f"{self.local_dir!r} go together: a period in steps, and a folder on each host's "
                "own disk or in its memory, such as /dev/shm/moejax. Give both, or neither."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementConfig(Section):
    """Which device holds which expert while a run trains."""

    _path = "placement."
    every: int = setting(0, ge=0)
    copies: int = setting(0, ge=0, le=64)
    file: str = setting("")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copies and not (self.every or self.file):
            raise ConfigError(
                f"placement.copies={self.copies} has no effect: nothing places experts. Set "
                "placement.every or placement.file, or placement.copies=0."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """What a run tells."""

    _path = "log."
    every: int = setting(1, ge=1)
    loads_every: int = setting(10, ge=0)
    tensorboard: bool = setting(True)
    progress: bool = setting(True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsConfig(Section):
    """Which implementation of the operators runs, where they have it."""

    _path = "kernels."
    impl: str = setting(
        "auto", choices=("auto", "ref", "chunked", "pallas", "pallas_gpu", "pallas_tpu")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """Profiler traces of some steps."""

    _path = "profile."
    steps: str = setting("")
    steps_at_signal: int = setting(3, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.windows()

    def windows(self) -> list[tuple[int, int]]:
        """First and last step of each trace."""
        windows = [self._window(part) for part in self.steps.split(",")] if self.steps else []
        for (_, last), (first, _) in itertools.pairwise(windows):
            if first <= last:
                raise ConfigError(
                    f"profile.steps={self.steps!r}: a trace begins before the one in front of it "
                    "has ended. Write ranges in ascending order, apart from each other."
                )
        return windows

    def _window(self, part: str) -> tuple[int, int]:
        first, _, last = part.strip().partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit() and int(last) >= int(first) >= 1):
            raise ConfigError(
                f"profile.steps={self.steps!r} is not a list of steps; write 10-12, or "
                "10-12,500-502."
            )
        return int(first), int(last)
