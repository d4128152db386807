"""The wheel stands on its own: typed, with configs, and it runs far from the checkout."""

import configparser
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from moejax.version import __version__

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.quick


def _run(*command: str, cwd: Path, **env: str) -> str:
    """Output of a command; its errors are shown when it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command} in {cwd}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built by the environment's own hatchling, so that no network is needed."""
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out))
    _run(*build, str(ROOT), cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed and nothing else."""
    target = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    _run(*pip, "--target", str(target), str(wheel), cwd=target)
    return target


def test_wheel_holds_types_configs_licence_and_script(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = configparser.ConfigParser()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        scripts.read_string(archive.read(entry_points).decode())
    assert wheel.name == f"moejax-{__version__}-py3-none-any.whl"
    assert {"moejax/py.typed", "pallas_kernels/py.typed"} <= names
    shipped = {f"moejax/_shipped/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert "moejax/_shipped/configs/tiny.py" in shipped <= names
    assert scripts["console_scripts"]["moejax"] == "moejax.cli.main:main"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    strangers = {name.split("/")[0] for name in names} - {"moejax", "pallas_kernels"}
    assert strangers == {f"moejax-{__version__}.dist-info"}


def test_installed_wheel_runs_from_another_folder(installed: Path, tmp_path: Path):
    """The script and a config by name, with the checkout out of sight."""
    # -S leaves out .pth files, and with them an editable install of this checkout.
    python = (sys.executable, "-S")
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    where = _run(
        *python, "-c", "import moejax; print(moejax.__file__)", cwd=tmp_path, PYTHONPATH=path
    )
    assert Path(where.strip()).is_relative_to(installed)
    script = str(installed / "bin" / "moejax")
    version = _run(*python, script, "--version", cwd=tmp_path, PYTHONPATH=path)
    assert __version__ in version
    shown = _run(*python, script, "config", "--config=tiny", cwd=tmp_path, PYTHONPATH=path)
    assert "parameters" in shown
    assert not list(tmp_path.iterdir()), "asking for the version and a config writes nothing"
