"""Gymnasium's own `make` makes envkit's environments."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import gymnasium
import pytest

import envkit
from envkit.errors import OptionError

MOVES = ["right", "right", "down", "nonsense", "down"]


def play(env: gymnasium.Env[str, str], seed: int) -> list[object]:
    """Return all that the environment returns in one episode."""
    returned: list[object] = [env.reset(seed=seed)]
    for move in MOVES:
        step = env.step(f"<answer>{move}</answer>")
        returned.append(step)
        if step[2] or step[3]:
            break
    return returned


@pytest.mark.parametrize("env_id", ["FrozenLake-v0", "Sokoban-v0"])
def test_gymnasium_plays_the_same_episode_as_envkit(env_id: str) -> None:
    with gymnasium.make(f"envkit/{env_id}") as theirs, envkit.make(env_id) as ours:
        assert play(theirs, seed=3) == play(ours, seed=3)


def test_options_reach_the_environment_and_its_refusal_reaches_the_caller() -> None:
    with pytest.raises(OptionError, match="slip"):
        gymnasium.make("envkit/FrozenLake-v0", slip=2)


def test_an_env_can_be_made_again_from_the_spec_that_it_carries() -> None:
    with gymnasium.make("envkit/FrozenLake-v0", size=5) as first:
        assert first.spec is not None
        with gymnasium.make(first.spec) as second:
            assert play(second, seed=1) == play(first, seed=1)


def test_gymnasium_makes_the_vector_environment_of_envkit() -> None:
    theirs, ours = gymnasium.make_vec("envkit/FrozenLake-v0", 3, size=5), envkit.make_vec("FrozenLake-v0", 3, size=5)
    with closing(theirs), closing(ours):
        assert type(theirs) is type(ours)
        assert list(theirs.reset(seed=5)[0]) == list(ours.reset(seed=5)[0])


def run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, since registries are for a whole process."""
    return subprocess.run([sys.executable, *flags, "-c", program], capture_output=True, text=True, check=False)


def test_a_name_that_gymnasium_cannot_read_does_not_take_the_others_with_it() -> None:
    done = run(
        """
import envkit
envkit.register("some/odd/Name-v0", "nowhere:Nothing")
import gymnasium, envkit.gym
envkit.gym.register_all()
gymnasium.make("envkit/FrozenLake-v0").close()
"""
    )
    assert done.returncode == 0
    assert "Gymnasium rejects the id 'some/odd/Name-v0'" in done.stderr


def test_an_id_alone_is_enough_and_no_environment_is_imported_for_the_names() -> None:
    done = run(
        """
import sys
import gymnasium
assert "envkit" not in sys.modules
gymnasium.make("envkit:envkit/FrozenLake-v0").close()
assert "envkit/Sokoban-v0" in gymnasium.registry
assert not [name for name in sys.modules if name.startswith("envkit.environments.sokoban")]
""",
        "-Werror",
    )
    assert done.stderr == ""
