"""The config of a whole run, and the rules that span its sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from moejax.config.data import DataConfig, EvalConfig
from moejax.config.elastic import microbatches, with_nearest
from moejax.config.fields import ConfigError, Section, setting
from moejax.config.lora import LoraConfig
from moejax.config.memory import MemoryConfig
from moejax.config.mesh import MeshConfig
from moejax.config.model import ModelConfig, MoeConfig
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
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    swap: SwapConfig = dataclasses.field(default_factory=SwapConfig)
    kernels: KernelsConfig = dataclasses.field(default_factory=KernelsConfig)
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

    def on(self, num_devices: int) -> RunConfig:
        """The config with the microbatches that `train.rows_per_device` asks for on these devices.

        Raises:
          ConfigError: as `check`.
        """
        if not self.train.rows_per_device:
            return self
        sizes = self.check(num_devices)
        count = microbatches(self.data.batch_size, _batch_shards(sizes), self.train.rows_per_device)
        return self.replace(train=self.train.replace(accumulation=count))

    def check(self, num_devices: int, devices_per_host: int = 1) -> dict[str, int]:
        """Rules that span sections, on this many devices.

        Returns:
          The mesh sizes.
        Raises:
          ConfigError: a rule is broken; where another number of devices (or of hosts of so many)
            would do, the line names the nearest.
        """
        try:
            sizes = self._sizes(num_devices)
        except ConfigError as error:
            raise with_nearest(error, self._sizes, num_devices, devices_per_host) from error
        _check_vocabulary(self)
        _check_trainable(self)
        _check_memory(self)
        _check_images(self)
        return sizes

    def _sizes(self, num_devices: int) -> dict[str, int]:
        """The mesh on this many devices; raises ConfigError where they do not fit the run."""
        sizes = self.mesh.sizes(num_devices)
        _check_later_axes(sizes)
        _check_experts(self.model, sizes)
        _check_hosts(self.with_hosts().model.moe, sizes["expert"])
        _check_batch(self, sizes)
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


def _batch_shards(sizes: dict[str, int]) -> int:
    return sizes["data"] * sizes["fsdp"] * sizes["expert"]


def _check_batch(run: RunConfig, sizes: dict[str, int]) -> None:
    ways = _batch_shards(sizes)
    rows, accumulation = run.data.batch_size, run.train.accumulation
    accumulation = 1 if run.train.rows_per_device else accumulation
    if rows % (ways * accumulation):
        raise ConfigError(
            f"data.batch_size={rows} does not divide over {ways} batch shards x "
            f"train.accumulation={accumulation}. Use a multiple of {ways * accumulation}."
        )
    eval_rows = run.eval.batch_size or rows
    if eval_rows % ways:
        raise ConfigError(f"eval.batch_size={eval_rows} does not divide over {ways} batch shards.")


def _check_images(run: RunConfig) -> None:
    """Rows with images need a tower."""
    if run.data.image_patches and not run.model.vision.num_layers:
        raise ConfigError(
            f"data.image_patches={run.data.image_patches} has no effect: the model has no vision "
            "tower. Set model.vision.num_layers, or data.image_patches=0."
        )


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


def _check_memory(run: RunConfig) -> None:
    """Host placements that would change nothing, or that something else cannot go with."""
    memory = run.memory
    frozen_base = bool(run.train.trainable or run.lora.rank)
    for wrong, text in (
        (
            memory.master == "host" and memory.optimizer != "host",
            "memory.master='host' needs memory.optimizer='host': both are updated layer by layer. "
            "Set both, or memory.master='device'.",
        ),
        (
            memory.master == "host" and run.train.compute_dtype == "float32",
            "memory.master='host' has no effect with train.compute_dtype='float32': the devices' "
            "copies would be as large. Use compute_dtype='bfloat16', or memory.master='device'.",
        ),
        (
            memory.frozen == "host" and not frozen_base,
            "memory.frozen='host' has no effect: all parameters are trained (train.trainable is "
            "empty and lora.rank is 0). Name the trained ones, or use memory.frozen='device'.",
        ),
        (
            memory.frozen == "host" and run.train.remat == "none",
            "memory.frozen='host' does not go with train.remat='none', which would keep every "
            "layer's weights on the devices for the backward pass. Use train.remat='full'.",
        ),
        (
            "host" in (memory.optimizer, memory.frozen)
            and bool(run.placement.every or run.placement.file),
            "memory.optimizer, master and frozen must be 'device' where placement.every or "
            "placement.file moves experts: they move within device memory only.",
        ),
    ):
        if wrong:
            raise ConfigError(text)


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
