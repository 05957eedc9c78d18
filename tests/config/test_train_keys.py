"""Every key of a training file acts: another value changes what a run does, not only what it was given.

The effects of a run, on virtual time and with a tiny policy, are the weights, metrics and episodes that it wrote, the
names of its files, what its environment saw, the passes of its model, the calls of other programs, and the error that
ended it. The configuration that it writes back, and messages, do not count. For each key, they are compared with those
of the run without the change.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import anyio
import pytest
import torch
from pydantic import Field
from torch import Tensor

from envkit import clock, register, registry
from envkit.config import RunConfig, grammar
from envkit.config.algorithm import AlgorithmSection
from envkit.config.grammar import Section
from envkit.env import AsyncEnv
from envkit.errors import EnvkitError
from envkit.fleet import WorkerClient
from envkit.metrics import Fold
from envkit.protocols import Episode, Sandbox
from envkit.runs.display import SilentDisplay
from envkit.runs.files import read_rows
from envkit.trainer_bridge.run_folder import plots
from envkit.types import Exchange, Info, Observation, Options, Reset, Step, Task, stable_hash
from envkit.wiring import environments
from envkit.wiring.contexts import EngineContext, Model, RendererContext, SandboxContext
from envkit.wiring.sandboxes import env_sandboxes
from envkit.wiring.training import checks
from envkit.wiring.training.kinds.vllm import open_vllm
from envkit.wiring.training.resolve import has_fast_bfloat16
from envkit.wiring.training.run import train
from envkit.wiring.training.torch_parts import open_renderer
from tests.config.leaves import Leaf, leaves, put_leaf
from tests.sandbox.fake.backend import FakeBackend, Fate
from tests.trainer_bridge.models import chat_tokenizer, write_chat

Content = Mapping[str, Any]
Effects = Mapping[str, object]

# --- The environment -------------------------------------------------------------------------------------------------


class Doors(AsyncEnv):
    """Open the right one of two doors, room after room; takes seconds, but only of virtual time.

    Attributes:
        seen: What the environments of this process saw.
    """

    metrics: ClassVar[Mapping[str, Fold]] = {"success": "last", "action_is_valid": "mean"}
    seen: ClassVar[Counter[str]] = Counter()
    open: ClassVar[int] = 0

    def __init__(self, **options: object) -> None: ...

    async def reset(self, *, seed: int, options: Options) -> Reset:
        self._options, self._seed, self._room = {"rooms": 3, **options}, seed, 0
        Doors.open += 1
        Doors.seen[f"at once: {Doors.open}"] += 1
        Doors.seen["resets"] += 1
        await _take(2.0)
        return Reset(self._observe(), {}, is_graded=bool(options.get("is_graded")))

    async def step(self, action: str) -> Step:
        if self._options.get("is_broken"):
            raise RuntimeError("broken")
        await _take(1000.0 if self._options.get("hangs") and self._seed % 2 else 1.0)
        is_right, self._room = action == f"<answer>{self._right}</answer>", self._room + 1
        ended = self._room == self._options["rooms"] or (is_right and bool(self._options.get("is_uneven")))
        info: Info = {"success": is_right, "action_is_valid": "answer" in action}
        reward = float(is_right) + len(action) % 3 / 10  # so that any two policies differ
        return Step(self._observe(), reward, ended, False, info)

    async def grade(self) -> float | None:
        await _take(5.0)
        return 0.5

    async def close(self) -> None:
        Doors.open -= 1

    @property
    def _right(self) -> str:
        return MOVES[stable_hash(self._seed, self._room) % 2]

    def _observe(self) -> Observation:
        return Observation(f"room {self._room} {'red' if self._right == 'left' else 'blue'}", MOVES)


MOVES = ("left", "right")


async def _take(seconds: float) -> None:
    if isinstance(asyncio.get_running_loop(), clock.VirtualLoop):
        await anyio.sleep(seconds)


class DoorExpert:
    """Knows the color of the right door."""

    def __init__(self, **options: object) -> None: ...

    def moves(self, observation: Observation) -> tuple[str, ...]:
        return ("left",) if "red" in observation.text else ("right",)

    def is_hazardous(self, observation: Observation) -> bool:
        return "red" in observation.text

    def answer(self, move: str) -> str:
        return f"<answer>{move}</answer>"


# --- Runs ------------------------------------------------------------------------------------------------------------

DOORS: Content = {"id": "Doors-v0", "num_envs": 4}
TINY: Content = {
    "env": DOORS,
    "threads": 1,
    "sandbox": {"kind": "none"},
    "rollout": {"group_size": 2, "max_turns": 3, "max_tokens": 64},
    "trainer": {"steps": 1, "groups_per_step": 2, "learning_rate": 0.02},
    "evaluation": {"episodes": 0},
    "tracking": {"to": []},
}
"""Reinforcement learning of a policy that a run of `FRESH` has saved, which `run_of` adds."""
FRESH: Content = {
    **TINY,
    "engine": {"hidden_size": 16, "layers": 1},
    "trainer": {"steps": 0},
    "imitation": {"states": 8, "batch": 4, "updates": 2, "check_episodes": 2},
}
"""A new policy, with imitation only."""
CHAT: Content = {
    **TINY,
    "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 128, "turn_tokens": 4},
    "engine": {"model": "CHAT", "dtype": "float32"},
    "trainer": {"steps": 1, "groups_per_step": 1, "learning_rate": 0.02, "precision": "float32"},
}
"""Reinforcement learning of a random model with a chat template."""
DIALOGUES: Content = {
    **CHAT, "trainer": {"steps": 0}, "imitation": {"kind": "dialogues", "file": "DIALOGUES", "batch": 2},
}  # fmt: skip


TAUGHT: Content = {
    **CHAT,
    "rollout": {"max_turns": 2, "max_tokens": 200, "turn_tokens": 40},
    "trainer": {"steps": 0},
    "imitation": {"kind": "demonstrations", "states": 8, "batch": 4, "updates": 1},
}
"""Demonstrations for that model."""
AGENT: Content = {**CHAT, "agent": {"function": "tests.config.agents:twice"}}
"""A function that calls that model."""
PROGRAM: Content = {
    **CHAT, "agent": {"command": [sys.executable, "-m", "tests.config.agents", "1"], "place": "beside"},
}  # fmt: skip
"""A program that calls that model."""
VLLM: Content = {**TINY, "engine": {"kind": "vllm", "model": "CHAT", "python": "PYTHON"}}
"""vLLM servers, whose interpreter is a script that writes its arguments to a file."""


@dataclass(frozen=True, slots=True)
class How:
    """How the effect of a key is shown.

    Attributes:
        value: The other value; `...` for that of `Leaf.other`.
        base: The training file without the change.
        more: Further keys of both runs.
        fate: What becomes of each sandbox.
        is_virtual: Whether the run has virtual time.
        measure: Returns the effects of a file.
    """

    value: object = ...
    base: Content = field(default_factory=lambda: TINY)
    more: Mapping[str, object] = field(default_factory=dict)
    fate: Fate = field(default_factory=Fate)
    is_virtual: bool = True
    measure: Callable[[Runs, Content, How], Effects] | None = None


class Runs:
    """Gives the effects of training files; works in `folder`. Another class may be the `root` of the files."""

    def __init__(self, folder: Path, root: type[Section] = RunConfig) -> None:
        self._folder = folder
        self._root = root
        self._found: dict[str, Effects] = {}
        self._places: dict[str, str] = {}
        self._folders: dict[str, Path] = {}
        self._argv = folder / "argv"

    def parsed(self, content: Content) -> RunConfig:
        """Return the training file, in which words in capitals stand for files."""
        text = json.dumps(content)
        for name, make in {"CHAT": self._chat, "DIALOGUES": self._dialogues, "PYTHON": self._python}.items():
            if f'"{name}"' in text:
                self._places.setdefault(name, str(make()))
                text = text.replace(f'"{name}"', json.dumps(self._places[name]))
        run = grammar.check(json.loads(text), self._root)
        assert isinstance(run, RunConfig)
        return run

    def effects(self, content: Content, how: How) -> Effects:
        """Return the effects of a training file; each is run once."""
        key = f"{json.dumps(content)} {how.fate} {how.is_virtual} {how.measure}"
        if key not in self._found:
            self._found[key] = (how.measure or Runs.train)(self, content, how)
        return self._found[key]

    def acts(self, leaf: Leaf, how: How) -> bool:
        """Return whether another value of a key has other effects."""
        base = how.base
        for key, value in how.more.items():
            base = put_leaf(base, key, value)
        if not {"model", "hidden_size"} & base.get("engine", {}).keys():
            base = put_leaf({**base, "imitation": {"kind": "none"}}, "engine.model", self._tiny())
        value = leaf.other() if how.value is ... else how.value
        return self.effects(base, how) != self.effects(put_leaf(base, leaf.key, value), how)

    def train(self, content: Content, how: How) -> Effects:
        """Run a training file, and return its effects."""
        Doors.seen.clear()
        Doors.open = 0
        error, seconds, folder = "", 0.0, self._folder / f"run-{len(self._found)}"
        self._folders.setdefault(json.dumps(content), folder)
        backend = FakeBackend(lambda number, rng: how.fate, capabilities={"isolation": False})

        async def main() -> None:
            nonlocal seconds
            began = clock.now()
            try:
                await train(self.parsed(content), folder, resume=False, force=False, display=SilentDisplay())
            finally:
                seconds = clock.now() - began

        with passes() as work, in_fake_sandboxes(backend):
            try:
                clock.run(main, virtual=how.is_virtual)
            except EnvkitError as refusal:
                error = str(refusal).replace(str(folder), "")
        effects: Effects = {"error": error, "seen": {**Doors.seen}, "sandboxes": len(backend.sandboxes)}
        if how.is_virtual:
            effects = {**effects, "passes": {**work}, "seconds": round(seconds, 3)}
        return {**effects, **written(folder)}

    def check(self, content: Content, how: How) -> Effects:
        """Return what is wrong with a training file."""
        try:
            return {"problems": checks.check(self.parsed(content))}
        except EnvkitError as refusal:
            return {"problems": str(refusal)}

    def prompts(self, content: Content, how: How) -> Effects:
        """Return the tokens of a conversation with thoughts."""
        tokenizer = chat_tokenizer()
        tokenizer.chat_template += "{% if enable_thinking is defined %}<think>{% endif %}"
        renderer = open_renderer(RendererContext(section=self.parsed(content).renderer, model=Model("", tokenizer)))
        seen = Observation("room 1")
        thoughts = tuple(tokenizer.encode("<think>so</think>left<|im_end|>", add_special_tokens=False))
        return {"tokens": (renderer.open(seen), renderer.extend([Exchange(seen, thoughts)], seen).ids)}

    def start_vllm(self, content: Content, how: How) -> Effects:
        """Return the arguments with which the servers of an engine are started."""
        self._argv.unlink(missing_ok=True)
        try:
            run = self.parsed(content)
            model = None if run.engine.model is None else Model(run.engine.model, None)
            context = EngineContext(section=run.engine, model=model, max_tokens=64, threads=1, seed=1)

            async def main() -> None:
                async with open_vllm(context):
                    pass

            clock.run(main)
        except EnvkitError as refusal:
            error = re.sub(r"its log is .*", "", str(refusal))
        lines = self._argv.read_text() if self._argv.exists() else ""
        return {"error": error, "arguments": re.sub(r"--(port|seed) \d+", "", lines)}

    def _tiny(self) -> str:
        """Return the folder of a saved tiny policy."""
        if "TINY" not in self._places:
            self.effects(FRESH, How())
            folder = self._folders[json.dumps(FRESH)]
            self._places["TINY"] = str(folder / "checkpoints" / "step-0" / "policy")
        return self._places["TINY"]

    def _chat(self) -> Path:
        return write_chat(self._folder / "chat", seed=3)

    def _dialogues(self) -> Path:
        path = self._folder / "dialogues.jsonl"
        turns = [[{"role": "user", "content": f"room {n}"}, {"role": "assistant", "content": "left"}] for n in range(3)]
        path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
        return path

    def _python(self) -> Path:
        """Write an interpreter that seems to have vllm, but only notes its arguments."""
        path = self._folder / "python"
        note = f'echo "$CUDA_VISIBLE_DEVICES $*" >> {self._argv}; exit 1'
        path.write_text(f'#!/bin/sh\nif [ "$2" = -c ]; then echo gpu; else {note}; fi\n')
        path.chmod(0o755)
        return path


@contextmanager
def in_fake_sandboxes(backend: FakeBackend) -> Iterator[None]:
    """Let sandboxes with environments be those of `backend`. Their environments are played in this process."""

    @asynccontextmanager
    async def opened(context: SandboxContext) -> AsyncIterator[FakeBackend]:
        async with backend:
            yield backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_sandboxes, "open_backend", opened)
        patch.setattr(env_sandboxes, "connect", FakeClient.connect)
        yield


class FakeClient:
    """A client of an env server that no sandbox runs: it plays in this process."""

    capacity = 99

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @classmethod
    @asynccontextmanager
    async def connect(cls, call_timeout_s: float, sandbox: Sandbox, **_: object) -> AsyncIterator[WorkerClient]:
        yield cls(sandbox)

    async def health(self) -> float:
        return await self._sandbox.probe(60.0)

    async def heartbeat(self) -> None:
        await self.health()

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Episode]:
        await self.health()
        async with environments.slots(1) as host, host.lease(task) as episode:
            yield episode


@contextmanager
def passes() -> Iterator[Counter[str]]:
    """Count the forward passes of modules, by class and number of torch threads, and of embeddings by their shape."""
    found: Counter[str] = Counter()
    lock = threading.Lock()

    def count(module: torch.nn.Module, _: object, output: object) -> None:
        shape = list(output.shape) if isinstance(module, torch.nn.Embedding) and isinstance(output, Tensor) else ""
        with lock:
            found[f"{type(module).__name__}{shape} with {torch.get_num_threads()} threads"] += 1

    handle = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        yield found
    finally:
        handle.remove()


_TIMES = ("_s", "_mib", "wall", "tokens_per_s")


def written(folder: Path) -> Effects:
    """Return what a run wrote, without times, and without what only repeats its configuration."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")) if folder.exists() else ():
        name = str(path.relative_to(folder))
        if path.is_dir() or name == "run.lock":
            continue
        found[name] = ""
        if path.name == "model.safetensors":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name in ("metrics.jsonl", "evaluations.jsonl"):
            found[name] = [
                {key: value for key, value in row.items() if not key.endswith(_TIMES) and key != "learning_rate"}
                for row in read_rows(path)
            ]
        elif path.parent.name == "trajectories":
            found[name] = [
                {key: one for key, one in json.loads(row).items() if not key.endswith(_TIMES)}
                for row in path.read_text().splitlines()
            ]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_SPECS", dict(registry._SPECS))
        patch.setattr(plots, "draw", lambda *_: None)  # takes longer than the run
        register("Doors-v0", Doors, expert=DoorExpert)
        register("JudgedDoors-v0", Doors, needs={"judge"})
        yield Runs(tmp_path_factory.mktemp("runs"))


# --- Keys ------------------------------------------------------------------------------------------------------------

TWO: Content = {**TINY, "env": [DOORS, {**DOORS, "options": {"rooms": 2}}]}
SERVED: Content = {key: value for key, value in TINY.items() if key != "sandbox"}
SERVER = "https://127.0.0.1:9"
JUDGED: Content = {**CHAT, "env": {**DOORS, "id": "JudgedDoors-v0"}}
IN_SANDBOX = {"sandbox.kind": "process"}
PPO = {"algorithm.preset": "ppo"}
REINFORCE = {"algorithm.preset": "reinforce"}
UNEVEN = {"env.options": {"is_uneven": True}}
LONG_ROOMS = {"env.options": {"is_uneven": True, "rooms": 9}, "env.num_envs": 99, "rollout.max_turns": 9}
KL = {"algorithm.kl.coefficient": 0.1}
TWO_STEPS = {"trainer.steps": 2}
MANY = {**TWO_STEPS, "rollout.group_size": 3}
OVERLONG = {"algorithm.overlong": {"max_tokens": 3, "buffer_tokens": 3}, **MANY, **UNEVEN}
BF16 = {"engine.dtype": "bfloat16", "algorithm.old_logprobs": "recomputed"}
FOUR = {"rollout.turn_tokens": 4}
THREE = {"trainer.steps": 3}
LONG = {"rollout.group_size": 4, "rollout.turn_tokens": 20, "algorithm.minibatches": 1}
LORA = {"trainer.lora": {}, "trainer.groups_per_step": 2}
CHECKED = How(base=VLLM, measure=Runs.check)
STARTED = How(base=VLLM, measure=Runs.start_vllm)

TRAIN: Mapping[str, How] = {
    "threads": How(2),
    "env.id": How("FrozenLake-v0"),
    "agent.function": How("tests.config.agents:once", AGENT, is_virtual=False),
    "agent.train": How(["another model"], AGENT, is_virtual=False),
    "agent.ignore": How([r"\d"], AGENT, is_virtual=False),
    "agent.command": How([sys.executable, "-m", "tests.config.agents", "2"], PROGRAM, is_virtual=False),
    "agent.env": How({"MORE": "1"}, PROGRAM, is_virtual=False),
    "agent.place": How("sandbox", PROGRAM, is_virtual=False),
    "agent.views": How({"/opt/agent": "/no/such/folder"}, PROGRAM, is_virtual=False),
    "env.weight": How(9.0, TWO),
    "env.num_envs": How(1),
    "env.options": How({"rooms": 2}),
    "env.url": How(SERVER),
    "env.token_file": How("/no/such/file", SERVED, {"env.url": SERVER}),
    "env.ca": How("/no/such/file", SERVED, {"env.url": SERVER}),
    "env.judge": How("model@http://127.0.0.1:9", JUDGED),
    "sandbox.kind": How("process"),
    "sandbox.count": How(2, more=IN_SANDBOX),
    "sandbox.liveness.lost_s": How(20.0, more={**IN_SANDBOX, **TWO_STEPS}, fate=Fate(hangs_after_s=2.5)),
    "sandbox.restarts.budget": How(more=IN_SANDBOX, fate=Fate(dies_after_s=2.5)),
    "sandbox.restarts.window_s": How(1.0, more=IN_SANDBOX, fate=Fate(dies_after_s=2.5)),
    "engine[transformers].model": How("CHAT", FRESH),
    "engine[transformers].device": How("cuda"),
    "engine[transformers].dtype": How("bfloat16"),
    "engine[transformers].hidden_size": How(32, FRESH),
    "engine[transformers].layers": How(2, FRESH),
    "engine[vllm].kind": CHECKED,
    "engine[vllm].model": replace(CHECKED, value=None),
    "engine[vllm].url": replace(CHECKED, value="http://127.0.0.1:9/path"),
    "engine[vllm].weights_folder": replace(CHECKED, value="/shared", more={"engine.weights_url": "http://h:8300"}),
    "engine[vllm].weights_url": replace(CHECKED, value="http://h:8300/path"),
    "engine[vllm].replicas": replace(CHECKED, value=2, more={"placement.engines": ["n0"]}),
    "engine[vllm].python": replace(STARTED, value="/no/such/python"),
    "engine[vllm].dtype": replace(STARTED, value="float32" if has_fast_bfloat16("auto") else "bfloat16"),
    "engine[vllm].gpu_memory_utilization": STARTED,
    "engine[vllm].max_num_seqs": STARTED,
    "engine[vllm].arguments": replace(STARTED, value={"swap-space": 1}),
    "renderer.history": How(1),
    "renderer.system": How("Be brief.", CHAT),
    "renderer.template": How({"enable_thinking": True}, measure=Runs.prompts),
    "renderer.thinking": How("cut", measure=Runs.prompts),
    "rollout.max_turns": How(2),
    "rollout.max_tokens": How(24),
    "rollout.turn_tokens": How(2),
    "rollout.step_timeout_s": How(0.5),
    "rollout.reset_timeout_s": How(1.0),
    "rollout.completion_timeout_s": How(1e-9, more=FOUR, is_virtual=False),
    "rollout.player_timeout_s": How(1e-9, more=FOUR, is_virtual=False),
    "rollout.episode_timeout_s": How(2.5),
    "rollout.grade_timeout_s": How(1.0, more={"env.options": {"is_graded": True}}),
    "rollout.ahead": How(1, more=TWO_STEPS),
    "rollout.asynchronous": How(value=True, more=TWO_STEPS),
    "rollout.max_lag": How(2),
    "rollout.lag_policy": How("resume"),
    "rollout.replay_schedule": How("/no/such/run"),
    "rollout.on_hang": How("fail", more={"env.options": {"hangs": True}}),
    "rollout.straggler": How(1.1, more={**LONG_ROOMS, "rollout.group_size": 8, **TWO_STEPS}),
    "rollout.filters": How(["zero_variance"], more=MANY),
    "rollout.max_filtered": How(0.25, more={"rollout.filters": [{"kind": "success_band", "low": 0.3, "high": 0.4}]}),
    "rollout.retries": How(0, more={"env.options": {"is_broken": True}}),
    "algorithm.preset": How("reinforce"),
    "algorithm.advantage": How("batch_normalised"),
    "algorithm.loss": How("reinforce", more={"algorithm.minibatches": 1}),
    "algorithm.aggregation": How("rollout_mean", more={**MANY, **UNEVEN}),
    "algorithm.correction": How("tis", more=BF16),
    "algorithm.entropy_coefficient": How(0.1),
    "algorithm.kl.coefficient": How(0.1),
    "algorithm.kl.estimator": How("k2", more=KL),
    "algorithm.kl.place": How("reward", more=KL),
    "algorithm.kl.target": How(1e-3, more={**KL, **TWO_STEPS, "algorithm.kl.horizon": 1}),
    "algorithm.kl.horizon": How(1, more={**KL, **TWO_STEPS, "algorithm.kl.target": 1e-3}),
    "algorithm.reference": How("CHAT", more=KL),
    "algorithm.overlong.max_tokens": How(2, more=OVERLONG),
    "algorithm.overlong.buffer_tokens": How(1, more=OVERLONG),
    "algorithm.overlong.penalty": How(2.0, more=OVERLONG),
    "algorithm.value_clip": How(1e-3, more=PPO),
    "algorithm.advantage_clip": How(0.1),
    "algorithm.epochs": How(2),
    "algorithm.minibatches": How(1),
    "algorithm.old_logprobs": How("recomputed", more={"engine.dtype": "bfloat16"}),
    "trainer.steps": How(3),
    "trainer.groups_per_step": How(3),
    "trainer.checkpoint_every": How(1, more=TWO_STEPS),
    "trainer.keep_checkpoints": How(1, more={**THREE, "trainer.checkpoint_every": 1}),
    "trainer.device": How("cuda"),
    "trainer.learning_rate": How(0.05),
    "trainer.critic_learning_rate": How(0.05, more=PPO),
    "trainer.schedule": How("linear", more=TWO_STEPS),
    "trainer.schedule_warmup_steps": How(2),
    "trainer.precision": How("bfloat16"),
    "trainer.gradient_checkpointing": How(value=True),
    "trainer.max_grad_norm": How(1e-3),
    "trainer.micro_tokens": How(20),
    "trainer.packing": How(base=CHAT, more=LONG),
    "trainer.lora.rank": How(4, CHAT, LORA),
    "trainer.lora.alpha": How(4.0, CHAT, LORA),
    "trainer.lora.targets": How(["q_proj"], CHAT, LORA),
    "placement.launcher": How("slurm"),
    "placement.trainer": How("n0:9"),
    "placement.engines": How(["n0"]),
    "placement.judge": replace(CHECKED, value="n9", base={**VLLM, "env": {**JUDGED["env"], "judge": "CHAT"}}),
    "placement.nodes": How("all"),
    "evaluation.episodes": How(2),
    "evaluation.attempts": How(more={"evaluation.episodes": 1}),
    "evaluation.split": How("train", more={"evaluation.episodes": 1}),
    "evaluation.every": How(1, more={**TWO_STEPS, "evaluation.episodes": 1}),
    "evaluation.seed": How(more={"evaluation.episodes": 2}),
    "imitation.kind": How("none", FRESH),
    "imitation.file": How("/no/such/file", DIALOGUES),
    "imitation.updates": How(3, FRESH),
    "imitation.batch": How(3, FRESH),
    "imitation.answers": How("bare", TAUGHT),
    "imitation.states": How(5, FRESH),
    "imitation.random_share": How(base=FRESH),
    "imitation.learning_rate": How(0.1, FRESH),
    "imitation.goal": How(0.0, FRESH, {"imitation.learning_rate": 1e-6, "imitation.check_episodes": 4}),
    "imitation.check_episodes": How(0, FRESH),
    "tracking.to": How(["tensorboard"]),
    "tracking.to[tensorboard].kind": How(more={"tracking.to": [{"kind": "tensorboard"}]}),
    "tracking.to[wandb].kind": How(more={"tracking.to": [{"kind": "tensorboard"}]}),
    "tracking.trajectories_every": How(2, more=THREE),
    "tracking.trajectories": How(1),
    "diagnostics.stop_on": How(
        ["ratio_always_1"], more={"trainer.learning_rate": 1e-30, "algorithm.old_logprobs": "recomputed"}
    ),
}
"""How the effects of keys are shown; a key that is missing here gets the value of `Leaf.other` in `TINY`."""

NOT_SHOWN: Mapping[str, str] = {
    "env.outage_timeout_s": "needs a server that stops: tests/e2e/training/test_served_training.py",
    "engine[vllm].seeds": "needs a vLLM server: tests/trainer_bridge/engines/vllm/test_losses.py",
}
"""Keys whose effects need more than this test has, each with the test that shows them. The list may only shrink."""

OF_PARTS = re.compile(r"algorithm\.(advantage|loss|aggregation|correction)(\[\w+\])?\.")
LEAVES = {leaf.name: leaf for leaf in leaves(RunConfig) if not OF_PARTS.match(leaf.name)}
"""All keys but those of the parts of algorithms, which tests/golden/test_part_keys.py shows."""


@pytest.mark.parametrize("name", [name for name in LEAVES if name not in NOT_SHOWN])
def test_a_key_of_a_training_file_acts(name: str, runs: Runs) -> None:
    assert runs.acts(LEAVES[name], TRAIN.get(name, How())), f"{name} has no effect"


def test_only_known_keys_are_listed() -> None:
    assert (TRAIN.keys() | NOT_SHOWN.keys()) - LEAVES.keys() == set()
    assert TRAIN.keys() & NOT_SHOWN.keys() == set()
    assert len(NOT_SHOWN) <= 2


@pytest.mark.parametrize("how", [How(), How(base=FRESH), How(base=CHAT), How(more=IN_SANDBOX)])
def test_the_same_file_has_the_same_effects(how: How, runs: Runs, tmp_path: Path) -> None:
    (leaf,) = (leaf for leaf in LEAVES.values() if leaf.name == "rollout.retries")
    assert not runs.acts(leaf, replace(how, value=4))  # no episode is void


class OldAlgorithm(AlgorithmSection):
    value_coefficient: Annotated[float, Field(ge=0)] = 0.5


class OldConfig(RunConfig):
    """A training file with a key that nothing reads."""

    algorithm: OldAlgorithm = Field(default_factory=lambda: OldAlgorithm.model_validate({}))


def test_a_dead_key_is_found(runs: Runs, tmp_path: Path) -> None:
    old = Runs(tmp_path, OldConfig)
    (dead,) = (leaf for leaf in leaves(OldConfig) if leaf.name not in LEAVES and not OF_PARTS.match(leaf.name))
    assert dead.name == "algorithm.value_coefficient"
    assert not old.acts(dead, How(more=PPO))
    assert old.acts(LEAVES["algorithm.value_clip"], How(1e-3, more=PPO))
