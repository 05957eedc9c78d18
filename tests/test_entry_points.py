"""Packages that bring environments are found, whichever of the two is imported first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envkit.installation import entry_points

LIFT = """
import gymnasium
{imports}
from envkit.spaces import Utf8Text

class Lift(gymnasium.Env):
    observation_space = action_space = Utf8Text(100)

    def reset(self, *, seed=None, options=None):
        return f"seed {{seed}}", {{}}

    def step(self, action):
        return action, 0.0, True, False, {{}}

def bring():
    print("brought")
    {body}
    envkit.register("Lift-v0", "lift:Lift")
"""


def run(folder: Path, program: str, *, imports: str = "import envkit", body: str = "pass", points: str = "") -> str:
    """What a program prints that sees the installed package `lift`; it may not warn."""
    metadata = folder / "lift-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "lift.py").write_text(LIFT.format(imports=imports, body=body), encoding="utf-8")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lift\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[envkit.envs]\nlift = lift:bring\n{points}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-Werror", "-c", program],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


PLAY = "print(envkit.make('Lift-v0').reset(seed=3)[0])"


@pytest.mark.parametrize(
    ("first", "imports"),
    [
        ("import envkit", "import envkit\nfrom envkit import make, EnvClient"),
        ("import envkit", "import envkit\nKNOWN = envkit.registered()"),
        ("from lift import Lift; import envkit", "import envkit\nKNOWN = envkit.registered()"),
    ],
)
def test_a_package_is_found_whichever_is_imported_first(tmp_path: Path, first: str, imports: str) -> None:
    assert run(tmp_path, f"{first}; {PLAY}; {PLAY}", imports=imports) == "brought\nseed 3\nseed 3\n"


def test_a_package_installed_while_the_program_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(tmp_path, (1, 1))  # changed long ago
    monkeypatch.syspath_prepend(tmp_path)
    assert not entry_points("envkit.lifts")
    (tmp_path / "lift-1.0.dist-info").mkdir()
    (tmp_path / "lift-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: lift\nVersion: 1.0\n")
    (tmp_path / "lift-1.0.dist-info/entry_points.txt").write_text("[envkit.lifts]\nlift = lift:bring\n")
    assert entry_points("envkit.lifts").names == {"lift"}


def test_a_function_that_looks_around_before_it_registers_is_called_once(tmp_path: Path) -> None:
    body = "print('Lift-v0' in [spec.id for spec in envkit.registered()])"
    assert run(tmp_path, f"import envkit; {PLAY}", body=body) == "brought\nFalse\nseed 3\n"


def test_gymnasium_knows_it_after_asking_and_importing_envkit_calls_nothing(tmp_path: Path) -> None:
    program = """
import gymnasium, envkit, envkit.gym
print("envkit/Sokoban-v0" in gymnasium.registry, "envkit/Lift-v0" in gymnasium.registry)
envkit.gym.register_all()
print(gymnasium.make("envkit/Lift-v0").reset(seed=4)[0])
"""
    assert run(tmp_path, program) == "True False\nbrought\nseed 4\n"


def test_a_package_that_fails_is_warned_about_once(tmp_path: Path) -> None:
    program = """
import warnings, envkit
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    envkit.registered(), envkit.registered()
print([str(one.message) for one in caught])
"""
    output = run(tmp_path, program, body="raise ValueError('boom')")
    assert output == "brought\n[\"environments of 'lift:bring' are left out: ValueError('boom')\"]\n"


def test_a_package_adds_players_to_an_environment_of_another(tmp_path: Path) -> None:
    program = "from envkit.wiring.environments import find; print('cheat:zero' in find('Code-v0').players)"
    points = "[envkit.players]\nCode-v0 = lift:PLAYERS\n"
    assert run(tmp_path, program, imports="import envkit\nPLAYERS = {'cheat:zero': len}", points=points) == "True\n"
