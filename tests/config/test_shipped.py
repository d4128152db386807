"""The shipped configs: base.py is the dataclasses' defaults, and every file loads and checks."""

import dataclasses
import importlib
import math

import pytest

from moejax.config import RunConfig, Section, allowed, flat_names
from moejax.config.load import (
    field_comments,
    load_config,
    section_names,
    shipped_names,
)
from moejax.models.parts import count_by_part, count_total_and_active, model_parts

pytestmark = pytest.mark.quick

# Name: (parameters, of them active), None where no published or counted figure is at hand.
COUNTS = {
    "tiny": (829_352, None),
    "tiny_vision": (362_476, None),
    "small": (223_361_568, None),
    "kimi_k3": (2_779_484_476_000, 104_189_612_640),
    "kimi_k31": (2_779_663_002_208, None),
    "kimi_k31_vision": (2_779_663_002_208 + 401_214_464 + 46_144_512, None),
    "deepseek_v3": (671_026_419_200, None),
    "kimi_k2": (1_026_408_232_448, None),
}


def _ranges(section: Section, prefix: str = "") -> dict[str, str]:
    """Dotted field -> its documented range in words."""
    out: dict[str, str] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            out |= _ranges(value, f"{prefix}{field.name}.")
        else:
            out[prefix + field.name] = allowed(field)
    return out


def test_base_is_the_defaults_field_by_field():
    base = importlib.import_module("configs.base").get_config()
    given = {}

    def walk(node, prefix=""):
        for name, value in node.items():
            if hasattr(value, "items"):
                walk(value, f"{prefix}{name}.")
            else:
                given[prefix + name] = value

    walk(base)
    defaults = flat_names(RunConfig())
    assert given.keys() == defaults.keys()
    for name, value in given.items():
        assert value == defaults[name] and type(value) is type(defaults[name]), name


def test_every_field_has_a_comment_that_ends_with_its_range():
    comments = field_comments()
    assert list(comments) == list(flat_names(RunConfig()))
    for name, limits in _ranges(RunConfig()).items():
        words = comments[name].removesuffix(f" [{limits}]" if limits else "")
        assert len(words) > 5 and "[" not in words, f"{name}: {comments[name]}"
        assert not limits or words != comments[name], f"{name} does not say {limits}"


def test_sections_are_all_named():
    names = section_names(RunConfig())
    assert {name.rpartition(".")[0] for name in flat_names(RunConfig())} == {"", *names}


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_config_loads_and_checks_on_the_fewest_devices(name):
    cfg = load_config(name)
    sizes = (cfg.mesh.stage, cfg.mesh.data, cfg.mesh.fsdp, cfg.mesh.expert)
    fewest = math.prod(n for n in sizes if n != -1)
    assert math.prod(cfg.check(fewest).values()) == fewest
    if name != "base":
        assert cfg.model.name == name


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    total, active = count_total_and_active(model_parts(load_config(name).model))
    assert total == COUNTS[name][0]
    assert COUNTS[name][1] in (None, active)


def test_kimi_linear_has_its_published_size():
    """49.1 B counted, 3.1 B active, of a model published as 48B-A3B."""
    parts = model_parts(load_config("kimi_linear_48b").model)
    total, active = count_total_and_active(parts)
    assert round(total / 1e9, 1) == 49.1 and round(active / 1e9, 1) == 3.1
    assert sum(count_by_part(parts).values()) == total


def test_k31_is_k3_and_its_indexers():
    k3, k31 = (
        count_by_part(model_parts(load_config(name).model)) for name in ("kimi_k3", "kimi_k31")
    )
    assert k31 == k3 | {"indexer": 178_526_208}
