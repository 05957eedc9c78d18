"""The wheel holds the tree, once each, under one name that nobody else has."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("environments", "sandbox", "trainer_bridge")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and with the wheel that was built from it, not from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel and sees this environment's third-party packages."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", interpreter, *install, wheel, cwd=folder)
    # Only the folder is added: an editable install of envkit in it is a .pth file, which is not followed.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return interpreter


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project whose folders are called like ours: one a package, one a namespace."""
    (tmp_path / "sandbox").mkdir()
    (tmp_path / "sandbox" / "__init__.py").write_text("mine = 'sandbox'\n", encoding="utf-8")
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "maze.py").write_text("mine = 'maze'\n", encoding="utf-8")
    return tmp_path


def tree() -> list[str]:
    """The files that belong into the wheel, by the name under which they are imported."""
    folders = [(ROOT / "envkit", "envkit"), *((ROOT / name, f"envkit/{name}") for name in LINKED)]
    return sorted(
        f"{name}/{path.relative_to(folder).as_posix()}"
        for folder, name in folders
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )


def test_the_wheel_holds_every_file_of_the_tree_once_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if not re.match(r"envkit-[^/]*\.dist-info/", name))
    assert names == tree()
    assert {"envkit/py.typed", "envkit/environments/catalog.py", "envkit/sandbox/__init__.py"} <= set(names)
    plugin = "envkit/trainer_bridge/engines/vllm/plugin"
    assert {f"{plugin}/envkit_vllm.py", f"{plugin}/envkit_vllm-1.dist-info/entry_points.txt"} <= set(names)


def test_the_sdist_holds_the_tests_and_the_licence(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/project/test_packaging.py", "docker/with-daemon"} <= names


def test_the_wheel_works_beside_folders_of_the_same_names(python: Path, project: Path) -> None:
    program = """
import envkit, environments.maze, sandbox
with envkit.make("FrozenLake-v0") as env:
    env.reset(seed=0)
print(envkit.__file__, environments.maze.mine, sandbox.mine)
import envkit.environments, envkit.sandbox, envkit.trainer_bridge
"""
    file, *mine = run(python, "-W", "error", "-c", program, cwd=project).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert mine == ["maze", "sandbox"]


def test_the_wheel_brings_the_command(python: Path, project: Path) -> None:
    assert "train" in run(python.with_name("envkit"), "--help", cwd=project)
