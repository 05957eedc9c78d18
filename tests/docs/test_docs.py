"""The examples in the documents work as shown."""

from __future__ import annotations

import doctest
import gc
import re
import runpy
import shlex
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

import envkit
from envkit import config, registry
from envkit.config import kinds
from envkit.environments.questions import QuestionTasks
from envkit.trainer_bridge.run_folder import plots
from envkit.wiring.training.agents import check_agent
from tests.cli.commands import called
from tests.docs.pages import AGENTS, DOCS, GUIDE, LIFT, files_of, install, run, sections_of
from tests.e2e.fleet.fleet import serving
from tests.trainer_bridge.models import write_chat

ROOT = Path(__file__).parents[2]
EXAMPLES = (
    "algorithms.md",
    "games.md",
    "tools.md",
    "wrappers.md",
    pytest.param("sandboxes.md", marks=pytest.mark.bwrap),
)
"""Pages with examples that doctest runs."""


@pytest.mark.slow
def test_the_environment_of_the_tutorial_keeps_the_contract_and_its_training_files_are_valid(tmp_path: Path) -> None:
    page = DOCS / "tutorial.md"
    installed = install(page, {"letters.py", "pyproject.toml"}, tmp_path)
    output = run(sys.executable, "-m", "envkit", "check-env", "Letters-v0", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "fail" not in output
    for text in re.findall(r"```yaml\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        config.parse(yaml.safe_load(text))


@pytest.fixture(scope="module")
def lift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the installed package of the guide."""
    return install(GUIDE, LIFT, tmp_path_factory.mktemp("lift"))


@pytest.mark.slow
def test_the_package_of_the_guide_installs_is_found_by_its_name_and_plays_as_shown(lift: Path, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(files_of(GUIDE.read_text(encoding="utf-8"))["questions.jsonl"])
    output = run(sys.executable, "-Werror", "-m", "doctest", GUIDE, cwd=tmp_path, PYTHONPATH=str(lift))
    assert output == ""  # doctest prints only differences
    with serving("process", tmp_path, "envs.sandboxes=1", "envs.warm=0", environments=lift) as gateway:
        for env_id in ("Lift-v0", "SlowLift-v0"):
            with envkit.make(env_id, url=gateway.url) as env:
                assert env.reset(seed=1)[0] == "The lift is on floor 3. It was called on floor 2."


ORACLE = """
import anyio

import envkit
from envkit.registry import load
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.types import RolloutRequest
from envkit.wiring.environments import Resources, find, slots
from envkit.wiring.sandboxes.backends import open_tool_pool


async def main():
    async with open_tool_pool("local") as pool, slots(1, {}, Resources(pool)) as host:
        for seed in range(2):
            request = RolloutRequest(f"{seed}", envkit.Task("Totals-v0", seed), 0)
            player = load(find("Totals-v0").players["oracle"])()
            print((await play(host, player, RolloutLimits(max_turns=10), request)).outcome.grade)


anyio.run(main)
"""


@pytest.mark.slow
@pytest.mark.bwrap
def test_the_environment_with_tools_plays_as_shown_and_its_oracle_solves_it(lift: Path, tmp_path: Path) -> None:
    page = GUIDE.read_text(encoding="utf-8")
    assert len(files_of(page)["totals.py"].splitlines()) <= 60
    (program,) = re.findall(r"^```python\n(import envkit\n.*?Totals-v0.*?)^```$", page, flags=re.M | re.S)
    for name, text in {"play.py": program, "oracle.py": ORACLE}.items():
        (tmp_path / name).write_text(text)
    printed = run(sys.executable, "-Werror", "play.py", cwd=tmp_path, PYTHONPATH=str(lift))
    assert printed.splitlines()[1:] == ["5 prices.txt", "[exit code 0]"]
    assert run(sys.executable, "-Werror", "oracle.py", cwd=tmp_path, PYTHONPATH=str(lift)) == "1.0\n1.0\n"


def test_the_file_of_questions_is_valid_and_so_is_its_training_file(tmp_path: Path) -> None:
    files = files_of(GUIDE.read_text(encoding="utf-8"))
    (tmp_path / "questions.jsonl").write_text(files["questions.jsonl"])
    tasks = QuestionTasks(file=str(tmp_path / "questions.jsonl"))
    assert sum(tasks.count(split) or 0 for split in tasks.splits) == 4
    config.parse(yaml.safe_load(files["questions.yaml"]))


def test_the_training_file_of_the_page_about_agents_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents/mini").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run = config.parse(yaml.safe_load(files_of(AGENTS.read_text(encoding="utf-8"))["mini.yaml"]))
    assert run.agent is not None
    assert check_agent(run.agent, run.renderer) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the short example does not close its client
def test_the_agent_of_the_page_about_agents_is_evaluated_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small random model has the name of SmolLM2. ``benchmarks/evidence/training/agent_page.py`` has the real one,
    and runs mini-swe-agent, too.
    """
    files, commands = sections_of(AGENTS.read_text(encoding="utf-8"))["A function"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    write_chat(tmp_path / "cache/models/smollm2-135m", seed=5, max_tokens=8192)
    monkeypatch.setenv("ENVKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)  # "PYTHONPATH=."
    monkeypatch.chdir(tmp_path)
    assert commands[:2] == ["pip install openai", "python agents.py"]
    agents = kinds.FAMILIES["agents"].added
    with patch.dict(agents):
        runpy.run_path("agents.py", run_name="__main__")
    assert "mean=" in capsys.readouterr().out
    with patch.dict(agents):
        code, output, errors = called(*shlex.split(commands[2].removeprefix("PYTHONPATH=. envkit ")))
    assert code == 0, errors
    assert "agent:agents:solve on FrozenLake-v0: 4 episodes in " in output + errors
    del sys.modules["agents"]
    gc.collect()


@pytest.mark.slow
def test_the_package_of_the_page_about_kinds_is_checked_and_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = DOCS / "extend.md"
    monkeypatch.syspath_prepend(install(page, {"toolbox.py", "pyproject.toml"}, tmp_path))
    (tmp_path / "toolbox.yaml").write_text(files_of(page.read_text(encoding="utf-8"))["toolbox.yaml"])

    def envkit_prints(*words: str) -> str:
        code, output, errors = called(*words, cwd=tmp_path)
        assert code == 0, errors
        return output

    assert envkit_prints("check", "toolbox.yaml") == "ok\n"
    played = envkit_prints("eval", "FrozenLake-v0", "--policy", "always:down", "--episodes", "8")
    assert "always:down on FrozenLake-v0: 8 episodes" in played
    small = (
        *("env.options.size=2", "sandbox.kind=none", "trainer.steps=1", "trainer.groups_per_step=2"),
        *("imitation.updates=1", "imitation.states=20", "imitation.check_episodes=0", "evaluation.episodes=0"),
        "threads=1",
        *("engine.hidden_size=16", "engine.layers=1", "rollout.group_size=2", "env.num_envs=4"),
    )
    monkeypatch.setattr(plots, "draw", lambda *_: None)  # takes longer than the run
    envkit_prints("train", "toolbox.yaml", "--output", "run", *(word for key in small for word in ("--set", key)))
    assert (tmp_path / "run" / "metric.csv").read_text().startswith("1,")


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_examples_of_a_page_print_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    failed, tried = doctest.testfile(str(DOCS / page), module_relative=False)
    assert (failed, tried > 0) == (0, True), capsys.readouterr().out


@pytest.mark.slow
def test_the_training_loop_of_forty_lines_learns_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    program, *_ = re.findall(r"```python\n(.*?)^```$", (DOCS / "own-trainer.md").read_text(), flags=re.M | re.S)
    assert sum(bool(line.strip()) for line in program.splitlines()) <= 40
    exec(compile(program, "own-trainer.md", "exec"), {"__name__": "loop"})
    returns = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert returns[0] < 0.1
    assert returns[-1] > 0.9


def test_the_reference_of_the_training_file_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    monkeypatch.syspath_prepend(DOCS)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DOCS / "generate.py"), run_name="__main__")
    assert ended.value.code == 0


def test_links_between_the_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))]
    assert len(links) > 10
    broken = [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert broken == []
