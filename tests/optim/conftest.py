"""The toy parameter tree as a fixture, once per session."""

import importlib.util
import pathlib

import pytest


@pytest.fixture(scope="session")
def toy():
    path = pathlib.Path(__file__).parent / "toy_tree.py"
    spec = importlib.util.spec_from_file_location("toy_tree", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
