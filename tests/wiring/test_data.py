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
from tests.cli.commands import called

WORDY = """
import envkit, gymnasium
from envkit.spaces import Utf8Text

def build(folder, announce):
    announce("writing words")
    (folder / "words.txt").write_text("apple pear")

def copy(folder, announce, source):
    (folder / "words.txt").write_text(source.read_text())

class Wordy(gymnasium.Env):
    metadata = {"render_modes": [], "metrics": {}}
    observation_space = action_space = Utf8Text(100)

    def __init__(self, *, data, words="wordy", render_mode=None):
        self.file = data[words] / "words.txt"

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
    envkit.register("Wordy-v0", Wordy, data={"wordy": build, "own-words": copy})
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
    for name in ("_SPECS", "_LOADED"):
        monkeypatch.setattr(registry, name, type(getattr(registry, name))(getattr(registry, name)))


def test_missing_data_is_built_when_it_is_first_used(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with environments.make("Wordy-v0") as env:
            assert env.reset(seed=0)[0].endswith("/data/wordy/words.txt: apple pear")
    announced = capsys.readouterr().err
    assert announced.startswith("Wordy-v0 needs the data wordy, which is not on this machine; building it once in ")
    assert announced.count("needs the data") == 1


def test_missing_data_in_a_sandbox_is_named_with_the_command_that_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(data.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match=r"Wordy-v0 needs the data wordy.*; run `envkit data wordy` on the machine of"):
        environments.open_env("Wordy-v0")
    with pytest.raises(UsageError, match=r"no environment has data 'wordi'.*wordy"):
        data.build("wordi", print)


def test_a_server_builds_no_data_in_a_call_of_a_client(tmp_path: Path) -> None:
    async def reset() -> None:
        async with (
            environments.slots(1, None, environments.Resources(builds_data=False)) as host,
            host.lease(Task("Wordy-v0", 0)) as episode,
        ):
            await episode.reset()

    with pytest.raises(UsageError, match=r"the data wordy, which its server does not have; run `envkit data w"):
        clock.run(reset)
    assert not (tmp_path / "cache").exists()


def test_data_from_files_is_built_only_by_the_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs the data own-words.*run: envkit data own-words --from FOLDER$"):
        environments.open_env("Wordy-v0", words="own-words")
    source = tmp_path / "mine.txt"
    source.write_text("plum")
    folder = f"{tmp_path}/cache/data/own-words"
    assert called("data", "own-words", "--from", str(source))[:2] == (0, f"{folder}\n")
    with environments.make("Wordy-v0", words="own-words") as env:
        assert env.reset(seed=0)[0].endswith("plum")


def test_a_source_that_is_missing_unwanted_or_too_late_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"own-words is made from your files; run: envkit data own-words --from"):
        data.build("own-words", print)
    with pytest.raises(UsageError, match=r"wordy is not made from files; leave out --from"):
        data.build("wordy", print, tmp_path)
    source = tmp_path / "mine.txt"
    source.write_text("plum")
    assert data.build("own-words", print, source)
    assert not data.build("own-words", print)
    with pytest.raises(UsageError, match=r"own-words is already in .*; delete that folder"):
        data.build("own-words", print, source)


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
