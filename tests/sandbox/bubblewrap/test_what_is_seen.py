"""What a default sandbox sees of the machine of the script that opens it, in real processes of their own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from envkit.sandbox.bubblewrap import host_python
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.types import SandboxSpec
from tests.contract.kinds import OF_HOST_IN_TMP, run

pytestmark = pytest.mark.bwrap

CHECKOUT = Path(__file__).parents[3]
OPEN = """
import sys
import envkit

with envkit.open_sandbox(backend="local", command=()) as sandbox:
    for word in sys.argv[1:]:
        done = sandbox.exec([sys.executable, "-c", word], timeout_s=30)
        print(done.stdout.strip() or done.stderr.strip().splitlines()[-1])
"""
SECRETS = (".env", "answers.json", "train.py", "tests/test_hidden.py")


def lay_out(project: Path) -> None:
    """A project with what nobody in a sandbox may see."""
    for name in SECRETS:
        file = project / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("SECRET_KEY=hunter2\n")
    (project / "tests" / "__init__.py").touch()
    (project / "train.py").write_text(OPEN)


def make_venv(project: Path) -> Path:
    """Make a virtual environment in `project` that also has our packages, and return its Python."""
    folder = project / ".venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "tools.pth").write_text(f"{sysconfig.get_path('purelib')}\n{CHECKOUT}\n")
    return folder / "bin" / "python"


def lines(project: Path, *argv: str, python: Path | str = sys.executable, path: str = "") -> list[str]:
    """What a program prints that is started in `project`."""
    done = subprocess.run(
        [str(python), *argv],
        cwd=project,
        env={"PATH": "/usr/bin:/bin", "HOME": str(project.parent / "home"), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def count_seen(project: Path) -> str:
    """A program that says how many of a project's secrets there are where it runs."""
    names = [str(project / name) for name in SECRETS]
    return f"import os; print(sum(os.path.lexists(name) for name in {names}))"


def test_nothing_of_the_scripts_folder_and_of_those_in_the_path_variable_is_seen(tmp_path: Path) -> None:
    project, named = tmp_path / "project", tmp_path / "named"
    for folder in (project, named):
        lay_out(folder)
    assert lines(project, "train.py", count_seen(project), count_seen(named), path=str(named)) == ["0", "0"]


@pytest.fixture(
    params=[
        ("hatchling", "hatchling.build"),  # a .pth file
        ("setuptools", "setuptools.build_meta"),  # an import hook
    ],
    ids=["hatchling", "setuptools"],
)
def editable(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """The root of a project, installed as editable into a virtual environment in it, and the Python of that."""
    backend, build = request.param
    pytest.importorskip(backend)
    project = tmp_path / "project"
    lay_out(project)
    package = project / "lifts"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("floors = 9\n")
    (project / "stairs.py").write_text("steps = 3\n")
    sections = {
        "hatchling": '[tool.hatch.build]\nonly-include = ["lifts", "stairs.py"]\ndev-mode-dirs = ["."]\n',
        "setuptools": '[tool.setuptools]\npackages = ["lifts"]\npy-modules = ["stairs"]\n',
    }
    (project / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["{backend}"]\nbuild-backend = "{build}"\n'
        '[project]\nname = "Lifts"\nversion = "1.0"\n'
        '[project.entry-points."envkit.envs"]\nstairs = "stairs:register"\n' + sections[backend]
    )
    python = make_venv(project)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *install, "--editable", str(project)], check=True
    )
    return project, python


def test_of_an_editable_package_the_modules_are_seen_and_can_be_imported_and_nothing_beside_them(
    editable: tuple[Path, Path],
) -> None:
    project, python = editable
    use = "import lifts, stairs; print(lifts.floors, stairs.steps)"
    beside = f"import os; print(sorted(os.listdir({str(project)!r})))"
    used, seen, there = lines(project, "train.py", use, count_seen(project), beside, python=python)
    assert (used, seen) == ("9 3", "0")
    assert there == "['.venv', 'lifts', 'stairs.py']"


def test_of_the_temporary_folder_only_the_interpreter_in_it_is_seen_and_nobody_can_add_to_it() -> None:
    with TemporaryDirectory(dir="/tmp", prefix="envkit-clone-") as folder:
        project = Path(folder, "project")
        lay_out(project)
        python = make_venv(project)
        listed = f"import os; print([sorted(os.listdir(path)) for path in ('/tmp', {folder!r}, {str(project)!r})])"
        added = f"open({str(project / 'json.py')!r}, 'w')"
        seen, refused, ran = lines(project, "train.py", listed, added, "import sys; print(sys.prefix)", python=python)
        assert seen == str([sorted({Path(folder).name, *OF_HOST_IN_TMP}), ["project"], [".venv"]])
        assert "Read-only file system" in refused
        assert ran == str(project / ".venv")


def test_a_copy_of_the_temporary_folder_does_not_contain_the_folders_that_are_shown_in_it(tmp_path: Path) -> None:
    """Snapshots are such copies; restored elsewhere, they would leave these folders."""

    async def main(shown: str) -> None:
        async with LocalBackend([*host_python.readable(), shown]) as backend:
            sandbox = await backend.start(SandboxSpec())
            await sandbox.write("/tmp/note", b"kept")
            await sandbox.download("/tmp", tmp_path / "copy")

    with TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "shown").mkdir()
        run(partial(main, str(Path(folder, "shown"))))
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["note"]


@pytest.mark.skipif(not all(LocalBackend().capabilities().values()), reason="not everything is enforced here")
def test_a_hostile_sandbox_is_not_shown_what_is_importable_here() -> None:
    """What hostile programs try in every kind of sandbox is in ``tests/contract/limits/test_hardening.py``."""

    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(untrusted=True, memory_mib=256, pids=64, disk_mib=32))
            seen = await sandbox.exec(["ls", str(CHECKOUT), str(Path(sys.prefix, "lib"))], timeout_s=20)
            assert seen.stderr.count("No such file") == 2

    run(main)
