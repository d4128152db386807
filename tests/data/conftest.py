"""The same documents in every format that is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.data.formats import (
    NUM_DOCUMENTS,
    TEXTS,
    write_parquet,
    write_records,
    write_saved_dataset,
)


@pytest.fixture(scope="session")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Source -> the settings that read TEXTS, in this order, from files of that format."""
    root = tmp_path_factory.mktemp("formats")
    half = NUM_DOCUMENTS // 2
    write_parquet(root / "parquet" / "a.parquet", TEXTS[:half])
    write_parquet(root / "parquet" / "b.parquet", TEXTS[half:])
    write_saved_dataset(root / "saved", TEXTS)
    write_records(root / "plain.array_record", list(TEXTS))
    write_records(root / "json.array_record", [json.dumps({"text": text}) for text in TEXTS])
    return {
        "parquet": {"source": "parquet", "paths": (f"{root}/parquet/*.parquet",)},
        "hf_dataset": {"source": "hf_dataset", "paths": (f"{root}/saved",)},
        "array_record": {"source": "array_record", "paths": (f"{root}/plain.array_record",)},
        "array_record_json": {"source": "array_record", "paths": (f"{root}/json.array_record",)},
    }
