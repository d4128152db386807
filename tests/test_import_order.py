"""Holds every import statement of both packages to the order of levels: up is forbidden.

Read from the syntax tree, so that imports inside functions and under `if TYPE_CHECKING` count.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.quick

# A package may import lower levels only; packages of one level do not import each other.
LEVELS = {
    "typing": 0, "config": 0, "version": 0,
    "partitioning": 1, "cluster": 1,
    "memory": 2,
    "layers": 3,
    "models": 4, "losses": 4,
    "lora": 5,
    "optim": 6, "data": 6, "checkpoint": 6, "observability": 6,
    "generate": 7,
    "train": 8,
    "planner": 9, "verify": 9,
    "cli": 10,
}  # fmt: skip


def imported_modules(source: str, package: str) -> list[tuple[int, str]]:
    """(line, absolute module) of each import in `source`, a module inside `package`.

    `from a import b` yields `a.b`, since b may be a module.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(parents + ([base] if base else []))
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def violations(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path`, relative to the checkout."""
    importer = path.with_suffix("").parts
    if importer == ("moejax", "__init__"):
        return []  # the public face re-exports from every level
    wrong = []
    for line, module in imported_modules(source, ".".join(path.parent.parts)):
        top, *rest = module.split(".")
        if top != "moejax":
            continue
        where = f"{path}:{line} imports {module}"
        if importer[0] == "pallas_kernels":
            wrong.append(f"{where}: pallas_kernels never imports moejax")
        elif not rest or rest[0] not in LEVELS:
            wrong.append(f"{where}: import from one of {', '.join(LEVELS)} instead")
        elif rest[0] != importer[1] and LEVELS[rest[0]] >= LEVELS[importer[1]]:
            wrong.append(
                f"{where}: {importer[1]} (level {LEVELS[importer[1]]}) "
                f"must not import {rest[0]} (level {LEVELS[rest[0]]})"
            )
    return wrong


def _source_files() -> list[Path]:
    folders = (ROOT / "moejax", ROOT / "pallas_kernels")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def test_every_package_has_a_level():
    package = ROOT / "moejax"
    names = {path.relative_to(package).parts[0] for path in package.rglob("*.py")}
    unknown = {name.removesuffix(".py") for name in names} - {"__init__"} - LEVELS.keys()
    assert not unknown, f"give {sorted(unknown)} a level"


def test_imports_only_point_down():
    files = _source_files()
    assert files
    wrong = []
    for path in files:
        wrong += violations(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    assert not wrong, "\n".join(wrong)


def test_kernels_need_nothing_but_jax():
    """pallas_kernels could leave as a library: jax, numpy and jaxtyping, nothing else of ours."""
    ours = {"flax", "optax", "orbax", "grain", "chex", "ml_collections", "rich", "absl"}
    for path in _source_files():
        relative = path.relative_to(ROOT)
        if relative.parts[0] == "pallas_kernels":
            source = path.read_text(encoding="utf-8")
            modules = imported_modules(source, ".".join(relative.parent.parts))
            used = {module.split(".")[0] for _, module in modules}
            assert not used & ours, f"{relative} imports {sorted(used & ours)}"


@pytest.mark.parametrize(
    ("file", "source", "allowed"),
    [
        ("moejax/layers/kda.py", "from moejax.partitioning import rules", True),
        ("moejax/layers/kda.py", "from moejax.layers.param import make", True),
        ("moejax/layers/kda.py", "from moejax import typing", True),
        ("moejax/layers/kda.py", "from moejax.models import decoder", False),
        ("moejax/layers/kda.py", "def f():\n  import moejax.train.step", False),
        ("moejax/layers/kda.py", "from ..models import decoder", False),
        ("moejax/layers/moe/router.py", "from ..kda import Kda", True),
        ("moejax/layers/moe/__init__.py", "from .router import Router", True),
        ("moejax/optim/muon.py", "from moejax.data import packing", False),
        ("moejax/optim/muon.py", "import moejax", False),
        ("moejax/version.py", "from moejax.config import run", False),
        ("moejax/__init__.py", "from moejax.train.run import train", True),
        ("pallas_kernels/kda/api.py", "from pallas_kernels import choose", True),
        ("pallas_kernels/kda/api.py", "from moejax.typing import Array", False),
    ],
)
def test_the_reader_sees_what_points_up(file: str, source: str, allowed: bool):
    assert (violations(Path(file), source) == []) is allowed
