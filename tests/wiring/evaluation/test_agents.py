"""The policy `agent:NAME`: a foreign agent that is a function, with the language model of `engine.model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import envkit
from envkit.config import evaluation
from envkit.errors import ConfigError
from envkit.types import Options
from envkit.wiring.evaluation.policies import find_policy
from tests.trainer_bridge.models import write_chat

LAKE: Options = {"map": "4x4", "instructions": False}
WAY = ("down", "down", "right", "down", "right", "right")
ONCE = "tests.config.agents:once"


@envkit.agent
async def cross_the_lake(task: envkit.AgentTask) -> None:
    """Ask the model before each move of the way to the goal."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    async with httpx.AsyncClient(base_url=task.base_url, headers={"authorization": f"Bearer {task.api_key}"}) as client:
        for move in WAY:
            answered = await client.post("/chat/completions", json={"model": task.model, "messages": messages})
            messages.append(answered.raise_for_status().json()["choices"][0]["message"])
            messages.append({"role": "user", "content": await task.step(f"<answer>{move}</answer>")})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("model"), seed=5)


@pytest.mark.parametrize("name", ["cross_the_lake", f"{__name__}:cross_the_lake"])
def test_an_agent_plays_with_the_model_of_the_engine(name: str, model: Path) -> None:
    found = envkit.evaluate(
        "FrozenLake-v0",
        f"agent:{name}",
        options=LAKE,
        split="any",
        episodes=1,
        turn_tokens=4,
        overrides=[f"engine.model={model}"],
    )
    assert (found.policy, found.metrics["success"].mean, found.usage.completions) == (f"agent:{name}", 1.0, len(WAY))


def test_the_section_agent_may_hold_the_other_keys_of_the_agent(model: Path) -> None:
    overrides = [f"engine.model={model}", "agent.ignore=[now]"]
    agent = find_policy(evaluation.read("FrozenLake-v0", overrides, policy=f"agent:{ONCE}"), None).agent
    assert agent is not None
    assert (agent.function, agent.ignore) == (ONCE, ["now"])


@pytest.mark.parametrize(
    ("policy", "overrides", "problem"),
    [
        (
            "agent:cross_the_lak",
            ["engine.model=m"],
            r"policy: no agent is called 'cross_the_lak' \(.* write MODULE:NAME\); did you mean 'cross_the_lake'\?",
        ),
        (
            "agent:tests.config.agents:never",
            ["engine.model=m"],
            r"policy: tests.config.agents:never cannot be loaded: .*",
        ),
        ("agent:cross_the_lake", [], "engine.model: missing; name the language model that the agent calls, .*"),
        (
            "agent:cross_the_lake",
            ["engine.model=m", f"agent.function={ONCE}"],
            "agent: is another agent than that of the policy agent:cross_the_lake; leave out one of the two",
        ),
        ("expert", [f"agent.function={ONCE}"], "agent: calls a policy of this process; name it as model:.*"),
    ],
)
def test_what_does_not_fit_is_one_problem(policy: str, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{problem}$"):
        find_policy(evaluation.read("FrozenLake-v0", overrides, policy=policy), None)
