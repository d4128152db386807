"""Config sections that say how the model is run: mesh, data, optimizer, loop, checkpoints, logs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

from moejax.config.fields import ConfigError, Section, section_entries, setting
from moejax.config.lora import LoraConfig
from moejax.config.model import ModelConfig, MoeConfig

MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DcnConfig(Section):
    """How much of each mesh axis crosses hosts or slices (slow network); 1 = none of it."""

    _path = "mesh.dcn."
    stage: int = setting(1, ge=1)
    data: int = setting(1, ge=1)
    fsdp: int = setting(1, ge=1)
    expert: int = setting(1, ge=1)
    context: int = setting(1, ge=1)
    tensor: int = setting(1, ge=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Devices along each mesh axis; at most one axis is -1 and takes what is left."""

    _path = "mesh."
    stage: int = setting(1, ge=-1)
    data: int = setting(1, ge=-1)
    fsdp: int = setting(-1, ge=-1)
    expert: int = setting(1, ge=-1)
    context: int = setting(1, ge=-1)
    tensor: int = setting(1, ge=-1)
    dcn: DcnConfig = dataclasses.field(default_factory=DcnConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        zero = [axis for axis in MESH_AXES if getattr(self, axis) == 0]
        if zero:
            raise ConfigError(
                f"mesh.{zero[0]}=0 is not allowed: it must be >= 1, or -1 for what is left."
            )

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Size of every axis on `num_devices` devices.

        Raises:
          ConfigError: the mesh does not fit.
        """
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        free = [axis for axis, n in sizes.items() if n == -1]
        fixed = math.prod(n for n in sizes.values() if n != -1)
        shown = " x ".join(f"{axis}={n}" for axis, n in sizes.items() if n != 1) or "1"
        if len(free) > 1:
            raise ConfigError(
                f"mesh {shown} leaves {len(free)} axes at -1; at most one may take what is left."
            )
        if num_devices % fixed or (not free and fixed != num_devices):
            leave = "" if free else "leave one axis at -1, or "
            product = f"a divisor of {num_devices}" if free else str(num_devices)
            advice = f"{leave}make the product of the fixed axes {product}"
            if fixed > num_devices:
                advice += f", or simulate more devices on the CPU (--devices={fixed})"
            raise ConfigError(
                f"mesh {shown} does not fit {num_devices} device{'s' * (num_devices != 1)}: "
                f"its fixed axes take {fixed}. {advice[0].upper()}{advice[1:]}."
            )
        sizes |= {axis: num_devices // fixed for axis in free}
        for axis, n in sizes.items():
            across = getattr(self.dcn, axis)
            if n % across:
                fitting = ", ".join(str(k) for k in range(1, n + 1) if n % k == 0)
                raise ConfigError(
                    f"mesh.dcn.{axis}={across} does not divide mesh.{axis}={n}. "
                    f"Use one of {fitting}."
                )
        return sizes


SOURCES = (
    "stdlib", "files", "chat", "synthetic", "parquet", "hf_dataset", "array_record", "cache",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFields(Section):
    """Where the documents of one source come from, and which of them are held out."""

    source: str = setting("stdlib", choices=SOURCES)
    paths: tuple = setting((), items=str)
    text_field: str = setting("text")
    record_format: str = setting("auto", choices=("auto", "text", "json"))
    exclude: tuple = setting(("test/", "site-packages/"), items=str)
    validation_percent: float = setting(5.0, gt=0.0, lt=100.0)
    validation_paths: tuple = setting((), items=str)
    train_split: str = setting("train")
    validation_split: str = setting("validation")
    synthetic_docs: int = setting(1000, ge=1)
    train_on: str = setting("completion", choices=("completion", "last", "all"))
    too_long: str = setting("drop", choices=("drop", "truncate"))
    chat_template: str = setting("")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig(SourceFields):
    """One member of a mixture, or one evaluation set: a source with a name."""

    _path = "source."
    name: str = setting("")
    weight: float = setting(1.0, gt=0.0)
    split: str = setting("all", choices=("all", "train", "validation"))
    source: str = setting("files", choices=SOURCES)


def _named(field: str, sources: Any) -> tuple:
    """The sources, each with a name of its own that can be a folder's."""
    named = tuple(
        source if source.name else source.replace(name=f"{source.source}-{place}")
        for place, source in enumerate(section_entries(SourceConfig, sources, field))
    )
    names = [source.name for source in named]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise ConfigError(
                f"{field}: the name {name!r} is not allowed: use letters, digits, '.', '_', '-'."
            )
        if names.count(name) > 1:
            raise ConfigError(f"{field} has {names.count(name)} entries called {name!r}.")
    return named


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(SourceFields):
    """Where text comes from and how it becomes rows of tokens."""

    _path = "data."
    mixture: tuple = setting((), section=SourceConfig)
    epochs: int = setting(0, ge=0)
    shuffle_seed: int = setting(-1, ge=-1, lt=2**31)
    tokenizer: str = setting("bpe")
    bpe_vocab_size: int = setting(512, ge=258)
    seq_len: int = setting(512, ge=2)
    batch_size: int = setting(16, ge=1)
    num_workers: int = setting(0, ge=0, le=64)
    prefetch: int = setting(4, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mixture", _named("data.mixture", self.mixture))


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
    compute_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    remat: str = setting("none", choices=("none", "full", "exchange"))
    rows_per_chunk: int = setting(0, ge=0)
    vocab_per_chunk: int = setting(0, ge=0)
    z_loss: float = setting(0.0, ge=0.0)
    stop_at: int = setting(-1, ge=-1)
    trainable: tuple = setting((), items=str)
    frozen_dtype: str = setting("float32", choices=("float32", "bfloat16"))
    self_check: str = setting("auto", choices=("auto", "on", "off"))
    prefetch: str = setting("within", choices=("off", "within", "ahead"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Evaluation on the validation split."""

    _path = "eval."
    every: int = setting(100, ge=0)
    batches: int = setting(0, ge=0)
    batch_size: int = setting(0, ge=0)
    sets: tuple = setting((), section=SourceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sets", _named("eval.sets", self.sets))


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
class ProfileConfig(Section):
    """Profiler trace of some steps."""

    _path = "profile."
    steps: str = setting("")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.window()

    def window(self) -> tuple[int, int] | None:
        """First and last step to trace, None without profiling."""
        if not self.steps:
            return None
        first, _, last = self.steps.partition("-")
        if not (
            first.isdigit() and (last or first).isdigit() and int(last or first) >= int(first) >= 1
        ):
            raise ConfigError(
                f"profile.steps={self.steps!r} is not a range of steps; write it as 10-12."
            )
        return int(first), int(last or first)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """A whole run."""

    seed: int = setting(0, ge=0, lt=2**31)
    init_from: str = setting("")
    init_allow: tuple = setting((), items=str)
    compile_cache: str = setting("auto")
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    samples: SamplesConfig = dataclasses.field(default_factory=SamplesConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    placement: PlacementConfig = dataclasses.field(default_factory=PlacementConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)

    def with_hosts(self) -> RunConfig:
        """The config whose model says over how many hosts its experts lie."""
        moe = self.model.moe
        moe = moe.replace(exchange_hosts=moe.exchange_hosts or self.mesh.dcn.expert)
        return self.replace(model=self.model.replace(moe=moe))

    def check(self, num_devices: int) -> dict[str, int]:
        """Rules that span sections, on this many devices.

        Returns:
          The mesh sizes.
        Raises:
          ConfigError: a rule is broken.
        """
        sizes = self.mesh.sizes(num_devices)
        _check_later_axes(sizes)
        _check_experts(self.model, sizes)
        _check_hosts(self.with_hosts().model.moe, sizes["expert"])
        _check_batch(self, sizes)
        _check_vocabulary(self)
        _check_trainable(self)
        return sizes


def _check_later_axes(sizes: dict[str, int]) -> None:
    later = [axis for axis in ("stage", "context", "tensor") if sizes[axis] > 1]
    if later:
        raise ConfigError(
            f"mesh.{later[0]}={sizes[later[0]]} is not supported yet: only data, fsdp and expert "
            f"may be larger than 1 in this version. Set mesh.{later[0]}=1."
        )


def _check_experts(model: ModelConfig, sizes: dict[str, int]) -> None:
    experts, axis = model.moe.num_experts, sizes["expert"]
    if "moe" in model.ffn_kinds() and experts % axis:
        below, above = experts - experts % axis, experts + axis - experts % axis
        raise ConfigError(
            f"model.moe.num_experts={experts} does not divide over mesh.expert={axis} "
            f"({experts % axis} left over). Use {below or above} or {above} experts, or another "
            "mesh.expert."
        )
    if model.moe.exchange == "local" and axis > 1:
        raise ConfigError(
            "model.moe.exchange='local' keeps every expert on every device, but "
            f"mesh.expert={axis}. Use exchange='auto', or mesh.expert=1."
        )


def _check_hosts(moe: MoeConfig, axis: int) -> None:
    """The exchange's level needs devices that fall into hosts."""
    if axis % moe.exchange_hosts:
        raise ConfigError(
            f"model.moe.exchange_hosts={moe.exchange_hosts} does not divide mesh.expert={axis}. "
            "Use a divisor, or 0 for mesh.dcn.expert."
        )
    if moe.exchange_level == "host" and axis > 1 and moe.exchange_hosts == 1:
        raise ConfigError(
            f"model.moe.exchange_level='host' needs the {axis} devices of mesh.expert on several "
            "hosts, but mesh.dcn.expert=1. Set it to their number, or use exchange_level='device'."
        )


def _check_batch(run: RunConfig, sizes: dict[str, int]) -> None:
    ways = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    rows, accumulation = run.data.batch_size, run.train.accumulation
    if rows % (ways * accumulation):
        raise ConfigError(
            f"data.batch_size={rows} does not divide over {ways} batch shards x "
            f"train.accumulation={accumulation}. Use a multiple of {ways * accumulation}."
        )
    eval_rows = run.eval.batch_size or rows
    if eval_rows % ways:
        raise ConfigError(f"eval.batch_size={eval_rows} does not divide over {ways} batch shards.")


def _check_trainable(run: RunConfig) -> None:
    """What touches every parameter does not go with parameters that must stay as they are."""
    if run.lora.rank == 0 and run.lora != LoraConfig():
        plain, fields = LoraConfig(), [f.name for f in dataclasses.fields(LoraConfig)]
        field = next(f for f in fields if getattr(run.lora, f) != getattr(plain, f))
        raise ConfigError(
            f"lora.{field}={getattr(run.lora, field)!r} has no effect: lora.rank=0 turns adapters "
            f"off. Give lora.rank a value like 8, or leave lora.{field} out."
        )
    if not run.train.trainable and not run.lora.rank:
        if run.train.frozen_dtype != "float32":
            raise ConfigError(
                f"train.frozen_dtype={run.train.frozen_dtype} has no effect: train.trainable is "
                "empty and lora.rank is 0: all are trained. Name the trained ones, or use float32."
            )
        return
    why = "lora.rank" if run.lora.rank else "train.trainable"
    for field in ("qk_clip", "ema_decay"):
        value = getattr(run.optim, field)
        if value:
            raise ConfigError(
                f"optim.{field}={value} does not go with {why}: it needs all parameters "
                f"trained. Set optim.{field}=0."
            )


def check_asked(run: RunConfig, names: Collection[str]) -> None:
    """Rules for fields that were set by hand, where a config may have them for its base's sake.

    Args:
      run: the config with them.
      names: dotted names of the fields.
    Raises:
      ConfigError: one has no effect.
    """
    moe = run.model.moe
    biased = moe.balance in ("quantile", "bias_step")
    asked = [n for n in ("model.moe.balance", "model.moe.bias_rate") if n in names]
    if run.lora.rank and biased and asked:
        value = getattr(moe, asked[0].rpartition(".")[2])
        raise ConfigError(
            f"{asked[0]}={value} has no effect with lora.rank={run.lora.rank}: router biases stay "
            "those of the base. Leave it out."
        )


_BYTE_VOCAB_SIZE = 257  # 256 bytes and end of text


def _check_vocabulary(run: RunConfig) -> None:
    """Tokenizers whose size the config alone tells; one in a file is checked when it is read."""
    sizes = {
        "bpe": ("data.bpe_vocab_size", run.data.bpe_vocab_size),
        "byte": ("the byte tokenizer", _BYTE_VOCAB_SIZE),
    }
    name, size = sizes.get(run.data.tokenizer, ("", 0))
    if size > run.model.vocab_size:
        given = f"{name}={size}" if name.startswith("data.") else f"{name} has {size} tokens, which"
        raise ConfigError(
            f"{given} is more than model.vocab_size={run.model.vocab_size}. "
            "Raise model.vocab_size, or use a smaller tokenizer."
        )
