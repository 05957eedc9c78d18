"""Virtual environments are made from cached layers; each layer is built once."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tools" / "cached_venv.py"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cached-venv")]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages from which pip installs; the cache is beside it, since its first layer takes seconds.

    Tests that do not depend on how a layer was made share those of `lamp` and of `door`.
    """
    folder = tmp_path_factory.mktemp("cached_venv") / "wheels"
    folder.mkdir()
    return folder


def add_wheel(wheels: Path, name: str, version: str = "1.0", build: str = "") -> Path:
    """Add a package with a program of the same name, which prints the folder of its environment."""
    about = f"{name}-{version}.dist-info"
    path = wheels / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "import sys\n\ndef main():\n    print(sys.prefix)\n")
        wheel.writestr(f"{name}/build.py", build)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path


def start(wheels: Path, folder: Path, *layers: str, cache: Path | None = None) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(wheels)}
    env["ENVKIT_CACHE"] = str(cache or wheels.parent / "cache")
    command = [sys.executable, str(PROGRAM), str(folder), *layers]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def make(wheels: Path, folder: Path, *layers: str) -> None:
    with start(wheels, folder, *layers) as process:
        errors = process.communicate()[1]
    assert process.returncode == 0, errors


def output(folder: Path, name: str) -> str:
    return subprocess.run([folder / "bin" / name], capture_output=True, text=True, check=True).stdout.strip()


def test_an_environment_needs_nothing_but_the_cache_when_its_layers_were_built(wheels: Path, tmp_path: Path) -> None:
    lamp = add_wheel(wheels, "lamp")
    make(wheels, tmp_path / "first", "lamp")
    lamp.unlink()
    make(wheels, tmp_path / "second", "lamp")
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert output(folder, "lamp") == str(folder)


def test_a_layer_whose_installation_fails_is_not_kept(wheels: Path, tmp_path: Path) -> None:
    with start(wheels, tmp_path / "first", "mirror") as process:
        assert "mirror" in process.communicate()[1]
    assert process.returncode != 0
    add_wheel(wheels, "mirror")
    make(wheels, tmp_path / "first", "mirror")
    assert output(tmp_path / "first", "mirror") == str(tmp_path / "first")


def test_two_processes_that_build_the_same_layer_both_get_it(wheels: Path, tmp_path: Path) -> None:
    add_wheel(wheels, "stool")
    folders = [tmp_path / name for name in ("first", "second")]
    started = [start(wheels, folder, "stool") for folder in folders]
    for process in started:
        with process:
            assert (process.communicate()[1], process.returncode) == ("", 0)
    assert [output(folder, "stool") for folder in folders] == [str(folder) for folder in folders]


def test_a_new_layer_removes_those_that_were_not_used_for_sixty_days(wheels: Path, tmp_path: Path) -> None:
    cache = wheels.parent / "cache" / "venvs"
    for name in ("sofa", "cushion"):
        add_wheel(wheels, name)
        make(wheels, tmp_path / name, name)
    layers = [path.parents[1] for name in ("sofa", "cushion") for path in cache.glob(f"*/bin/{name}")]
    layers.append(cache / "unused")
    layers[2].mkdir()
    layers[2].with_suffix(".lock").touch()
    for layer, unused_days in zip(layers, (61, 61, 59), strict=True):
        lock = layer.with_suffix(".lock")
        then_s = lock.stat().st_mtime - unused_days * 24 * 3600
        os.utime(lock, (then_s, then_s))
    make(wheels, tmp_path / "used", "cushion")
    add_wheel(wheels, "blanket")
    make(wheels, tmp_path / "blanket", "blanket")
    assert [layer.exists() for layer in layers] == [False, True, True]
    assert output(tmp_path / "sofa", "sofa") == str(tmp_path / "sofa")
