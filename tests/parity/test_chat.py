"""Chat templates: what is recorded in the fixture is what this transformers makes of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.parity
FOLDER = Path(__file__).parents[1] / "fixtures" / "chat"


def test_the_recorded_ids_and_masks_are_those_of_transformers(tmp_path):
    written = tmp_path / "recorded.json"
    subprocess.run([sys.executable, FOLDER / "generate.py", written], check=True)
    assert json.loads(written.read_text()) == json.loads((FOLDER / "recorded.json").read_text())
