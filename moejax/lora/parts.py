"""The model of a run with the adapters that its config asks for."""

from __future__ import annotations

from typing import Any

from moejax.config import ConfigError, RunConfig
from moejax.lora.maps import linear_maps
from moejax.lora.select import Selection, select_adapters
from moejax.models.hf_config import FAMILIES
from moejax.models.hf_config_write import family_name
from moejax.models.parts import ModelParts, model_parts


def adapted_parts(cfg: RunConfig, **options: Any) -> tuple[ModelParts, Selection | None]:
    """`model_parts` of a run, and which maps have adapters; None without `lora.rank`.

    The indexer is left as it is unless it has adapters itself: its loss would train nothing.

    Raises:
      ConfigError: targets that cannot be, see `select_adapters`, or a stage of DSA in which they
        would not learn.
    """
    if not cfg.lora.rank:
        return model_parts(cfg.model, **options), None
    base = model_parts(cfg.model, **options)
    spelling = FAMILIES[family_name(cfg.model)].spelling
    selection = select_adapters(cfg.lora, linear_maps(base, spelling), base.segments)
    model = cfg.model
    if "dsa" in model.attention_kinds():
        on_indexer = [t.map.name for t in selection.targets if t.map.kind == "indexer"]
        _check_stage(model.dsa.stage, on_indexer)
        if not on_indexer:
            model = model.replace(dsa=model.dsa.replace(stage="frozen"))
    options |= {"adapters": selection.plan, "adapter_dropout": cfg.lora.dropout}
    options["vision_adapters"] = selection.vision
    options["base_format"] = cfg.lora.base_format
    return model_parts(model, **options), selection


def _check_stage(stage: str, on_indexer: list[str]) -> None:
    if stage == "warmup":
        raise ConfigError(
            "model.dsa.stage='warmup' trains the indexer alone, so adapters would not learn. "
            "Set model.dsa.stage='frozen', or 'sparse' for adapters on the indexer."
        )
    if stage == "frozen" and on_indexer:
        raise ConfigError(
            f"lora targets {on_indexer[0]}, but model.dsa.stage='frozen' leaves the indexer as it "
            "is. Set model.dsa.stage='sparse', or leave it out."
        )
