"""What of this machine a sandbox is shown so that our Python runs in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


def test_of_a_checkout_only_the_packages_are_shown(tmp_path: Path) -> None:
    readable, import_path = shown(tmp_path, tmp_path.parent / "home")
    inside = {Path(place).name for place in readable if Path(place).parent == CHECKOUT and place != sys.prefix}
    assert inside == {"envkit", "environments", "sandbox", "trainer_bridge"}
    assert str(CHECKOUT) in import_path


def test_a_home_is_never_shown_even_where_a_script_lies_right_in_it(tmp_path: Path) -> None:
    home = tmp_path / "user"
    home.mkdir()
    readable, import_path = shown(home, home)
    assert not any(home.is_relative_to(place) for place in (*readable, *import_path))
