"""What of this machine a sandbox is shown so that our Python runs in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import envkit
from envkit.sandbox.bubblewrap import host_python

CHECKOUT = Path(__file__).parents[3]

SHOW = """
import json, sys
from envkit.sandbox.bubblewrap import host_python
print(json.dumps([host_python.readable(), host_python.import_path()]))
"""


def shown(cwd: Path, home: Path, *argv: str, also: str = "") -> tuple[list[str], list[str]]:
    """What a program would show that runs in `cwd`, for a user whose home is `home`; ``script.py`` by default."""
    (cwd / "script.py").write_text(SHOW)
    done = subprocess.run(
        [sys.executable, *(argv or ["script.py"])],
        cwd=cwd,
        env={"HOME": str(home), "PYTHONPATH": f"{CHECKOUT}:{also}"},
        capture_output=True,
        text=True,
        check=True,
    )
    readable, import_path = json.loads(done.stdout)
    return readable, import_path


def test_python_and_the_package_are_shown() -> None:
    places = [Path(place) for place in host_python.readable()]
    for needed in (
        sys.executable,
        Path(sys.executable).resolve(),
        Path(json.__file__),
        Path(envkit.__file__).resolve(),
    ):
        assert any(Path(needed).is_relative_to(place) for place in (*places, Path("/usr")))


def test_of_a_checkout_only_the_packages_are_shown(tmp_path: Path) -> None:
    readable, import_path = shown(tmp_path, tmp_path.parent / "home")
    inside = {Path(place).name for place in readable if Path(place).parent == CHECKOUT and place != sys.prefix}
    assert inside == {"envkit", "environments", "sandbox", "trainer_bridge"}
    assert str(CHECKOUT) in import_path


def test_what_the_path_variable_names_is_not_shown_unless_packages_are_installed_in_it(tmp_path: Path) -> None:
    project, installed, work = tmp_path / "project", tmp_path / "lib" / "site-packages", tmp_path / "work"
    for folder in (project, installed, work):
        folder.mkdir(parents=True)
    readable, import_path = shown(work, tmp_path / "home", also=f"{project}:{installed}")
    assert {str(project), str(installed)} & {*readable, *import_path} == {str(installed)}
    assert str(installed) in readable
    assert str(installed) in import_path


def test_a_home_is_never_shown_even_where_a_script_lies_right_in_it(tmp_path: Path) -> None:
    home = tmp_path / "user"
    home.mkdir()
    readable, import_path = shown(home, home)
    assert not any(home.is_relative_to(place) for place in (*readable, *import_path))


def test_nothing_is_listed_that_lies_in_something_listed() -> None:
    places = [Path(place) for place in host_python.readable()]
    assert not any(one.is_relative_to(other) for one in places for other in places if one != other)
