"""Messages about missing optional packages, and commands in messages that work as typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MISSING = ("docker", "ray", "requests", "torch", "wandb")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("installation")]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of a virtual environment without some packages; the checkout's ``docker`` is only a folder.

    It holds links to all other packages that are installed here.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.partition("-")[0] not in MISSING:
            (packages / entry.name).symlink_to(entry)
    program = folder / "bin" / "envkit"
    program.write_text(f"#!{folder}/bin/python\nfrom envkit.__main__ import main\n\nmain()\n", encoding="utf-8")
    program.chmod(0o755)
    return folder / "bin"


WITHOUT_DOCKER = ("sandbox ls",)
"""Commands that do not need docker."""


@pytest.mark.parametrize("words", WITHOUT_DOCKER)
def test_a_command_that_does_not_need_docker_works_without_its_client_and_reports_it(
    words: str, answers: dict[str, tuple[int, str, str]]
) -> None:
    code, _, message = answers[words]
    missing = (
        f"the package docker is not installed (the folder {ROOT}/docker has the same name, but is not the package)"
    )
    assert (code, message) == (0, f'docker was left out: {missing}; install it: pip install "envkit[docker]"\n')


def test_the_doctor_works_without_dockers_client_and_names_it_once(answers: dict[str, tuple[int, str, str]]) -> None:
    code, output, _ = answers["doctor"]
    assert code == 0
    assert output.count('pip install "envkit[docker]"') == 1


NEEDS = [
    ("sandbox run --backend docker -- true", "docker", "docker"),
    ("serve --backend docker --port 0", "docker", "docker"),
    ("check lake.yaml", "torch", "train"),
    ("check lake.yaml --set tracking.to=[wandb]", "wandb", "wandb"),
    ("check lake.yaml --set sandbox.kind=docker", "docker", "docker"),
    ("eval FrozenLake-v0 --policy checkpoint:run", "torch", "train"),
]
"""Commands, the package that each needs, and the extra of envkit that installs it."""

COMMANDS = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from envkit.__main__ import main

found = {}
for words in sys.argv[1:]:
    sys.argv = ["envkit", *words.split()]
    output, errors = (TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            main()
    except SystemExit as ended:
        found[words] = [ended.code, *(stream.buffer.getvalue().decode() for stream in (output, errors))]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return the exit code, output and errors of each command; one process runs them, since it takes long to start."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "lake.yaml").write_text("env: {id: FrozenLake-v0}\n")
    words = [*WITHOUT_DOCKER, "doctor", *(words for words, _, _ in NEEDS)]
    done = subprocess.run(
        [bare / "python", "-c", COMMANDS, *words],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("words", "package", "extra"), NEEDS)
def test_what_needs_a_missing_package_names_it_and_the_command_that_installs_it(
    words: str, package: str, extra: str, answers: dict[str, tuple[int, str, str]]
) -> None:
    code, output, message = answers[words]
    assert (code, output) == (2, "")
    assert any(
        f"the package {package} is not installed" in line and f'install it: pip install "envkit[{extra}]"' in line
        for line in message.splitlines()
    )


@pytest.mark.parametrize(("is_on_path", "is_inside"), [(True, False), (False, True)])
def test_a_command_is_written_as_it_works_when_typed(
    is_on_path: bool, is_inside: bool, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bare.parent if is_inside else tmp_path)
    monkeypatch.setenv("PATH", f"{bare}:/usr/bin:/bin" if is_on_path else "/usr/bin:/bin")
    program = "from envkit.installation import command; print(command('list', 'a b'))"
    printed = subprocess.run([bare / "python", "-c", program], capture_output=True, text=True, check=True).stdout
    start = "envkit" if is_on_path else "bin/envkit" if is_inside else f"{bare}/envkit"
    assert printed == f"{start} list 'a b'\n"
    found = shutil.which(start)
    assert found is not None
    assert Path(found).absolute() == bare / "envkit"
