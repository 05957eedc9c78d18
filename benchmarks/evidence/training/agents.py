"""Play an episode with agents as their authors publish them, in a sandbox without a network, and count what trains.

    python benchmarks/evidence/training/agents.py [--only CLIENT] [--work FOLDER]

Installs Claude Code, Codex and opencode with npm, in pinned versions, and runs each with ``agent.command``, as a
training run does. Anthropic's client is that of envkit's own tests. The policy is scripted: it calls the tools of the
agent, also in a wrong way, and gives work to sub-agents. It answers in tokens that no tokenizer would choose.
OpenHands is not among the agents, because it was not tried.

A part holds if the agent ends without an error and has written the file of its task, each trained token is where the
policy sampled it, and each sampled token trains once or is masked with a cause. The exit status is 1 if one does not.
Needs bubblewrap and npm. Takes some minutes, after a download of 400 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser

from envkit import clock
from envkit.config.parts import AgentSection
from envkit.protocols import Sandbox
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.types import Completion, SamplingParams, SandboxSpec, StopReason
from tests.trainer_bridge.agents.agents import RENDERER, LetterEngine, Played, checked
from tests.wiring.training.agent_stage import Stage, on_stage

NAME = "agents"
STALE_AFTER = (
    "envkit/wiring/training/agents.py",
    "sandbox/egress",
    "trainer_bridge/agents",
    "trainer_bridge/render/chat.py",
)
TWIN = "tests/e2e/training/test_agents.py::test_a_program_in_a_sandbox_trains_with_the_client_of_anthropic"
TASK = "TASK: write the word hello into hello.txt"
WRITE = "echo hello > hello.txt"
LIMITS = RolloutLimits(max_turns=40, max_tokens=200_000, turn_tokens=4000, player_timeout_s=600)
SPEC = SandboxSpec(memory_mib=3000, pids=1024)
INSIDE = "/opt/agent"

Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Client:
    """An agent, and what the policy answers to it.

    Attributes:
        api: The API that it calls.
        package: Package of npm with its program, and the version; empty for a package of Python that is installed.
        command: Its command in the sandbox, where `INSIDE` is the folder of its package.
        env: Its variables.
        calls: The tool calls of each answer of the policy; then it says that it is done.
    """

    api: str
    package: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    calls: Sequence[Sequence[Call]] = ()


ANTHROPIC = """
import subprocess, sys
import anthropic
client = anthropic.Anthropic()
tool = {"name": "bash", "description": "Run a command.", "input_schema": {"type": "object"}}
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    with client.messages.stream(model="claude", max_tokens=500, messages=messages, tools=[tool]) as stream:
        answer = stream.get_final_message()
    messages.append({"role": "assistant", "content": answer.content})
    uses = [block for block in answer.content if block.type == "tool_use"]
    if not uses:
        break
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": subprocess.getoutput(use.input["command"])}
        for use in uses
    ]
    messages.append({"role": "user", "content": results})
"""
CODEX = (
    f"exec {INSIDE}/vendor/x86_64-unknown-linux-musl/bin/codex exec --skip-git-repo-check "
    "--dangerously-bypass-approvals-and-sandbox --model policy --config model_provider=envkit --config "
    '"model_providers.envkit={name=\\"envkit\\",base_url=\\"$OPENAI_BASE_URL\\",env_key=\\"OPENAI_API_KEY\\"}" "$1"'
)
OPENCODE = {
    "autoupdate": False,
    "provider": {
        "envkit": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"policy": {"name": "policy"}},
        }
    },
}
CLIENTS: Mapping[str, Client] = {
    "anthropic": Client(
        "messages",
        "",
        ["python3", "-c", ANTHROPIC, "{task}"],
        {"PYTHONPATH": INSIDE},
        [[("bash", {"command": WRITE})], [("bash", {"command": "cat hello.txt"}), ("bash", {"command": "pwd"})]],
    ),
    "claude-code": Client(
        "messages",
        "@anthropic-ai/claude-code-linux-x64@2.1.332",
        [f"{INSIDE}/claude", "--print", "{task}", "--dangerously-skip-permissions", "--model", "policy"],
        {
            "HOME": "/tmp",
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ANTHROPIC_AUTH_TOKEN": "",
        },
        [
            [("Bash", {"command": WRITE, "description": "Write the file"})],
            [("Read", {"file_path": "/workspace/hello.txt"})],
            [("ToolSearch", {"query": "select:WebFetch"})],
            [("Edit", {"file_path": "/workspace/hello.txt", "old_string": "hello", "new_string": "hello"})],
            [("Agent", {"description": "sub", "prompt": "SUB: say hi", "subagent_type": "general-purpose"})] * 2,
            [("Unknown", {})],
            [("Bash", {"command": 3})],
        ],
    ),
    "codex": Client(
        "responses",
        "@openai/codex@0.171.0-linux-x64",
        ["sh", "-c", CODEX, "sh", "{task}"],
        {"HOME": "/tmp"},
        [
            [("exec_command", {"cmd": WRITE})],
            [("exec_command", {"cmd": "cat hello.txt"})] * 2,
            [("multi_agent_v1.spawn_agent", {"message": "SUB: say hi"})],
            [("unknown", {})],
            [("exec_command", {"cmd": 3})],
        ],
    ),
    "opencode": Client(
        "chat completions",
        "opencode-linux-x64@1.18.33",
        [f"{INSIDE}/bin/opencode", "run", "--model", "envkit/policy", "{task}"],
        {"HOME": "/tmp", "OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE), "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        [
            [("bash", {"command": WRITE, "description": "Write the file"})],
            [("read", {"filePath": "/workspace/hello.txt"})],
            [("task", {"description": "sub", "prompt": "SUB: say hi", "subagent_type": "general"})] * 2,
            [("bash", {"command": 3})],
        ],
    ),
}


class ScriptedPolicy(LetterEngine):
    """Answers to the task with the next calls, and to sub-agents and requests for titles with a text."""

    def __init__(self, calls: Sequence[Sequence[Call]]) -> None:
        super().__init__()
        self._calls = [*calls]

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **more: Any) -> Completion:
        self.answers = [self._answer(RENDERER.text(prompt_ids))]
        return await super().generate(prompt_ids, params, **more)

    def _answer(self, prompt: str) -> str:
        if TASK not in prompt or "# Tools" not in prompt:
            return "It says hi"
        calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in self._next()]
        return "\n".join(["I go on.", *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])

    def _next(self) -> Sequence[Call]:
        return self._calls.pop(0) if self._calls else ()


def installed(client: Client, work: Path) -> tuple[Path, str]:
    """Return the folder of a client's package, which is installed below `work`, and its version."""
    if not client.package:
        return Path(anthropic.__file__).parents[1], anthropic.__version__
    name, _, version = client.package.rpartition("@")
    folder = work / "node_modules" / name
    if not folder.exists():
        npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", work]
        subprocess.run([*npm, f"{name}@npm:{client.package}"], check=True)
    found = json.loads((folder / "package.json").read_text())["version"]
    if found != version:
        sys.exit(f"{folder} has version {found} instead of {version}; remove it")
    return folder, version


def measure(client: Client, work: Path) -> dict[str, Any]:
    """Play an episode with a client, and return what became of its calls."""
    folder, version = installed(client, work)
    section = AgentSection(command=[*client.command], env={**client.env}, views={INSIDE: str(folder)})
    engine = ScriptedPolicy(client.calls)
    written: list[str] = []
    episodes: list[Played] = []
    began = clock.stopwatch()

    async def read(sandbox: Sandbox) -> None:
        written.append((await sandbox.exec(["cat", "hello.txt"])).stdout)

    async def main(stage: Stage) -> None:
        episodes.append(checked(await stage.play(TASK, read), engine))

    on_stage(main, section, engine, limits=LIMITS, spec=SPEC)
    (played,) = episodes
    stop, failures = played.trajectory.outcome.stop, dict(played.player.failures)
    return {
        "version": version,
        "api": client.api,
        "stop": stop.value,
        "failures": failures,
        "file": written,
        "calls": len(played.trajectory.turns),
        "samples": len(played.samples),
        "tokens_sampled": engine.num_sampled,
        "tokens_trained": played.num_trained,
        "tokens_masked": dict(played.masked),
        "fields_without_effect": dict(played.player.unused),
        "seconds": round(clock.stopwatch() - began),
        "holds": stop is StopReason.TERMINATED and not failures and written == ["hello\n"],
    }


def main() -> int:
    """Measure; return exit code 1 if a part does not hold."""
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=CLIENTS, help="measure only this client")
    arguments.add_argument("--work", type=Path, default=Path("runs/agents"), help="where the agents are installed")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    holds = True
    for name, client in CLIENTS.items():
        if asked.only in (None, name):
            found = evidence.part(name, lambda client=client: measure(client, asked.work.resolve()))  # type: ignore[misc]
            print(name, json.dumps(found), flush=True)
            holds = holds and found["holds"]
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
