"""Data of environments: built once, and read-only in sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit import clock, registry
from envkit.config.parts import BuiltInSandboxSection
from envkit.errors import ConfigError, UsageError
from envkit.types import Task
from envkit.wiring import data, environments
from envkit.wiring.sandboxes.env_sandboxes import sandbox_host

WORDY = """
import envkit, gymnasium
from envkit.spaces import Utf8Text

def build(folder, announce):
    announce("writing words")
    (folder / "words.txt").write_text("apple pear")

class Wordy(gymnasium.Env):
    metadata = {"render_modes": [], "metrics": {}}
    observation_space = action_space = Utf8Text(100)

    def __init__(self, *, data, render_mode=None):
        self.file = data["wordy"] / "words.txt"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"{self.file}: {self.file.read_text()}", {}

    def step(self, action):
        try:
            self.file.write_text(action)
        except OSError as error:
            action = type(error).__name__
        return action, 0.0, True, False, {}

def register():
    envkit.register("Wordy-v0", Wordy, data={"wordy": build})
"""


@pytest.fixture(autouse=True)
def wordy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with an environment that has data, and an empty cache."""
    site = tmp_path / "site-packages"
    (site / "wordy-1.0.dist-info").mkdir(parents=True)
    (site / "wordy.py").write_text(WORDY)
    (site / "wordy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wordy\nVersion: 1.0\n")
    (site / "wordy-1.0.dist-info" / "entry_points.txt").write_text("[envkit.envs]\nwordy = wordy:register\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("ENVKIT_CACHE", str(tmp_path / "cache"))
    for name in ("_SPECS", "_PACKAGES", "_LOADED"):
        monkeypatch.setattr(registry, name, type(getattr(registry, name))(getattr(registry, name)))


def test_missing_data_is_named_with_the_command_that_builds_it() -> None:
    with pytest.raises(UsageError, match=r"Wordy-v0 needs the data wordy.*envkit data wordy"):
        environments.open_env("Wordy-v0")
    with pytest.raises(UsageError, match=r"no environment has data 'wordi'.*wordy"):
        data.build("wordi", print)


def test_data_is_built_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert data.build("wordy", print)
    assert not data.build("wordy", print)
    assert capsys.readouterr().out == "writing words\n"
    with environments.make("Wordy-v0") as env:
        assert env.reset(seed=0)[0] == f"{tmp_path}/cache/data/wordy/words.txt: apple pear"


@pytest.mark.bwrap
def test_a_sandbox_sees_the_data_and_cannot_change_it(tmp_path: Path) -> None:
    data.build("wordy", print)

    async def play() -> tuple[str, str]:
        async with (
            sandbox_host(BuiltInSandboxSection(kind="local"), slots_per_sandbox=1) as host,
            host.lease(Task("Wordy-v0", 0)) as episode,
        ):
            start = await episode.reset()
            return start.observation.text, (await episode.step("melon")).observation.text

    assert clock.run(play) == ("/data/wordy/words.txt: apple pear", "OSError")
    assert (tmp_path / "cache/data/wordy/words.txt").read_text() == "apple pear"


def test_two_environments_may_share_data_but_not_with_different_builders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_SPECS", {})
    registry.register("Wordier-v0", print, data={"shared": print})
    registry.register("Wordiest-v0", print, data={"shared": print})
    with pytest.raises(ConfigError, match="data: Wordless-v0 and Wordier-v0 declare data 'shared' with different"):
        registry.register("Wordless-v0", print, data={"shared": repr})
