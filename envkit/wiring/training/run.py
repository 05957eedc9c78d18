"""Training runs: from a training file to a trained policy."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import anyio

from envkit import clock, config
from envkit.config import RunConfig
from envkit.config.parts import BuiltInSandboxSection, TorchTrainerSection
from envkit.errors import ConfigError, EnvkitError, leaves
from envkit.http.client.chat import Address
from envkit.local_host import SlotHost
from envkit.protocols import EnvHost, PhasedTrainer, Player
from envkit.runs.display import Display
from envkit.runs.files import read_rows
from envkit.trainer_bridge.diagnostics import Diagnostics, Probe
from envkit.trainer_bridge.evaluation.evaluator import Evaluator, success_of, valid
from envkit.trainer_bridge.loop import Imitation, LoopSettings, TrainLoop
from envkit.trainer_bridge.models.saved_policy import SavedPolicy
from envkit.trainer_bridge.rollout import PolicyPlayer
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.run_folder.checkpoint import RunState
from envkit.trainer_bridge.run_folder.record import METRICS, RunRecord, refuse_other_format
from envkit.trainer_bridge.scheduler import Rollout
from envkit.trainer_bridge.scheduler.continuous import Continuous
from envkit.trainer_bridge.stopping import ONE_S, Stop, stop_on_signals
from envkit.trainer_bridge.weights.channel import WeightChannel, weights_folder
from envkit.types import JSON, PauseMode, stable_hash
from envkit.wiring import environments
from envkit.wiring import tasks as task_sets
from envkit.wiring.contexts import TrackerContext, open_part
from envkit.wiring.sandboxes.env_sandboxes import ToolSettings, sandbox_host
from envkit.wiring.sandboxes.run_nodes import run_nodes
from envkit.wiring.training.agents import open_player, views_of
from envkit.wiring.training.checks import check, check_docker
from envkit.wiring.training.kinds.vllm import judge_server
from envkit.wiring.training.models import locate
from envkit.wiring.training.policy import Policy, open_policy
from envkit.wiring.training.remote import check_server, served_host
from envkit.wiring.training.resolve import (
    default_lora,
    filled,
    limits_of,
    names_of,
    pace_of,
    parameters,
    parts_of,
    policy_kind,
    replay_of,
    resolve,
    specs_of,
)
from envkit.wiring.training.sources import open_source

OnStep: TypeAlias = Callable[[int, Mapping[str, float]], None]


async def train(
    run: RunConfig, folder: Path, *, resume: bool, force: bool, display: Display, on_step: OnStep | None = None
) -> dict[str, JSON]:
    """Train with the settings `run` and write all results into `folder`.

    If `folder` contains a run, `resume` continues it from its newest checkpoint and `force` replaces it. At the first
    SIGINT or SIGTERM, training saves a checkpoint of the last finished train step or update of imitation, and ends. A
    signal more than `ONE_S` seconds later ends the process immediately. `on_step` is called after each train step with
    its number and its metrics.

    Returns:
        The content of ``summary.json``; ``"stopped"`` is true if a signal ended the run.

    Raises:
        ConfigError: The training file has problems; see `checks.check`, `checks.check_docker` and
            `remote.check_server`.
        UsageError: The folder, the model or the checkpoint cannot be used.
    """
    problems = [*check(run), *await check_docker(run), *await check_server(run)]
    if problems:
        raise ConfigError(problems)
    if (lora := default_lora(run)) is not None:
        size = f"{(parameters(run) or 0) / 1e9:.1f} billion parameters"
        display.announce(f"trainer.lora: rank {lora.rank}, because the model has {size}; null trains all of them")
    run = resolve(run)
    newest: Path | None = None
    state = RunState()
    if resume:
        refuse_other_format(folder)
        newest = checkpoint.latest(folder / "checkpoints")
        state = checkpoint.load_state(newest)
    elif not force:
        RunRecord.refuse_taken(folder)
    try:
        return await _Run(run, folder, display, state, newest, force, on_step).finish()
    except BaseExceptionGroup as group:
        found = list(leaves(group))
        raise next((leaf for leaf in found if isinstance(leaf, EnvkitError)), found[0]) from None
    finally:
        display.close()


@dataclass
class _Run:
    """One training run. `newest` is the checkpoint to resume from, and `state` its state; None starts a new run."""

    run: RunConfig
    folder: Path
    display: Display
    state: RunState
    newest: Path | None
    force: bool
    on_step: OnStep | None

    def __post_init__(self) -> None:
        self.specs = specs_of(self.run)
        self.policy: Policy | None = None
        self.record: RunRecord | None = None
        self.diagnostics = Diagnostics(found=self._found())
        self.stop = Stop(self.display.announce)
        self.warned = self.state.step > 0
        self.began = clock.stopwatch() - self.state.wall_s

    async def finish(self) -> dict[str, JSON]:
        """Train until the last step or a signal, and return the summary."""
        with ExitStack() as opened, stop_on_signals(self._on_signal):
            with self.stop.cancels():
                await self._play_and_learn(opened)
            summary = self._summary()
            if self.record is not None:
                self.record.summary(summary)
                with self.stop.waits_for("the plots"):
                    await clock.to_thread(self.record.plots)
            return summary

    def _on_signal(self) -> None:
        self.display.close()
        self.stop.request(f"; a signal more than {ONE_S:g} s from now ends the run at once, at its last checkpoint")

    async def _play_and_learn(self, opened: ExitStack) -> None:
        """Load the policy, start the sandboxes, and train.

        With `force`, an existing run is deleted only after the steps that fail most often, such as loading the policy.
        """
        async with AsyncExitStack() as parts:
            if self.newest is not None:
                await self._open_record(opened, parts)
            threads = self._learning_threads()
            with self.stop.waits_for("the policy to be loaded"):
                chosen = getattr(self.run.engine, "weights_folder", None)
                folder = parts.enter_context(weights_folder(self.folder, chosen=chosen))
                opening = open_policy(self.run, folder=folder, threads=threads, announce=self.display.announce)
                policy = self.policy = await parts.enter_async_context(opening)
            self.display.announce(f"policy: {policy.description}")
            if (size := getattr(policy.trainer, "checkpoint_bytes", 0)) >= _LARGE_BYTES:
                kept = self.run.trainer.keep_checkpoints
                self.display.announce(f"checkpoints: {size / 1e9:.1f} GB each, {kept} kept, and that of the best step")
            async with self._host(policy) as host:
                record = self.record or await self._open_record(opened, parts)
                if self.newest is not None:
                    await policy.trainer.restore(str(self.newest))
                # No output of an expert is executed, and validations of imitation are as harmless: in this process.
                slots = await parts.enter_async_context(environments.slots(self.run.num_envs))
                playing = open_player(
                    self.run.agent,
                    policy.engine,
                    policy.renderer,
                    limits_of(self.run.rollout),
                    self.display.announce,
                )
                async with playing as player:
                    loop = self._loop(policy, player, host, record, self._imitation(policy, slots))
                    try:
                        await loop.run(self.display)
                    finally:
                        # Save the trained weights even after a stop or the loss of all sandboxes.
                        with anyio.CancelScope(shield=True):
                            await loop.save()

    def _learning_threads(self) -> int:
        """Return the key `threads`, or else torch's number of threads when the run first started."""
        if not isinstance(self.run.trainer, TorchTrainerSection):
            return self.run.threads
        from envkit.trainer_bridge.threads import default_threads  # imported late: loads torch

        chosen = self.run.threads or self.state.facts.get("threads")
        if not isinstance(chosen, int):
            chosen = default_threads()
        self.state.facts["threads"] = chosen
        return chosen

    async def _open_record(self, opened: ExitStack, parts: AsyncExitStack) -> RunRecord:
        """Create or reopen the run's folder and open the trackers. `opened` closes the record, `parts` the trackers."""
        text, step = config.dump(self.run), self.state.step
        if self.newest is None:
            record, first_step = RunRecord.create(self.folder, text, force=self.force), 0
        else:
            is_evaluated = self.state.facts.get("evaluated") == step
            record = RunRecord.resume(self.folder, text, step=step, is_evaluated=is_evaluated, complete=config.complete)
            first_step = step + 1
        self.record = opened.enter_context(closing(record))
        content = self.run.model_dump(mode="json")
        for section in self.run.tracking.to:
            context = TrackerContext(section=section, folder=record.folder, first_step=first_step, config=content)
            record.add(await open_part(parts, "trackers", section.kind, context))
        return record

    def _imitation(self, policy: Policy, slots: SlotHost) -> Imitation | None:
        """Return the phase of imitation; None without one, or after its end."""
        run, section = self.run, self.run.imitation
        if section.kind == "none" or "imitation" in self.state.facts:
            return None
        assert isinstance(policy.trainer, PhasedTrainer), "open_policy refuses others"
        limits, seed = limits_of(run.rollout), stable_hash(run.seed, "validation")
        rollout = Rollout(slots, PolicyPlayer(policy.engine, policy.renderer, limits), limits, run.num_envs)
        parts = zip(run.envs, self.specs, parts_of(run, section.check_episodes or 0), strict=True)
        tasks = [
            task_sets.task(spec, env.options, "validation", seed, number)
            for env, spec, count in parts
            for number in range(count)
        ]

        async def greedy() -> float:
            """Play validation tasks, which training and evaluation never use."""
            phase = f"validation-{self.state.imitated}"
            result = await rollout.groups(tasks, 1, phase=phase, temperature=0.0, seed=0)
            return success_of(valid(result.trajectories))

        return Imitation(
            partial(open_source, run, self.specs, policy.renderer, slots),
            policy.trainer,
            greedy if tasks else None,
            section.goal,
        )

    @asynccontextmanager
    async def _host(self, policy: Policy) -> AsyncIterator[EnvHost]:
        if self.run.envs[0].url is not None:
            async with served_host(self.run, self.display.announce) as served:
                yield served
            return
        section, limits = self.run.sandbox, self.run.rollout
        async with AsyncExitStack() as parts:
            nodes = None
            if policy.placed.nodes:
                assert isinstance(section, BuiltInSandboxSection), "place_run refuses others"
                opening = run_nodes(policy.launcher, policy.placed.nodes, section, self.display.announce)
                nodes = await parts.enter_async_context(opening)
            judge: str | Address | None = next((one.judge for one in self.run.envs if one.judge), None)
            if (model := self.run.served_judge) is not None and (place := policy.placed.judge) is not None:
                announce, launcher = self.display.announce, policy.launcher
                server = judge_server(model, self.run.engine, launcher, place, lambda line: announce(f"judge: {line}"))
                judge = await parts.enter_async_context(server)
            host = sandbox_host(
                section,
                slots_per_sandbox=-(-self.run.num_envs // section.count),
                call_timeout_s=limits.step_timeout_s,
                slow_timeout_s=max(limits.reset_timeout_s or limits.step_timeout_s, limits.grade_timeout_s or math.inf),
                announce=self.display.announce,
                tools=ToolSettings(
                    frozenset(spec.id for spec in self.specs if spec.needs),
                    needs=frozenset().union(*(spec.needs for spec in self.specs)),
                    only=all(spec.needs for spec in self.specs),
                    episodes=self.run.num_envs + self._episodes_at_once(),
                    judge=judge,
                    views=views_of(self.run.agent),
                ),
                nodes=nodes,
            )
            yield await parts.enter_async_context(host)

    def _episodes_at_once(self) -> int:
        """Return how many episodes can be in progress, graders included: of a train step, an evaluation, or both."""
        run = self.run
        return (sum if filled(run.rollout.ahead) else max)(
            (
                run.trainer.groups_per_step
                * (run.rollout.group_size + run.rollout.group_extra)
                * (filled(run.rollout.ahead) + 1),
                run.evaluation.episodes * run.evaluation.attempts * len(run.envs),
            )
        )

    def _loop(
        self, policy: Policy, player: Player, host: EnvHost, record: RunRecord, imitation: Imitation | None
    ) -> TrainLoop:
        run = self.run
        limits = limits_of(run.rollout)
        rollout = Rollout(host, player, limits, run.num_envs)
        evaluation, state, (first, *others) = run.evaluation, self.state, run.envs
        evaluated = [
            list(task_sets.all_tasks(spec, section.options, evaluation.split, evaluation.seed, evaluation.episodes))
            for section, spec in zip(run.envs, self.specs, strict=True)
        ]
        # With several environments, the metrics contain the values of each one under its name.
        names = names_of(run) if len(run.envs) > 1 else []
        settings = LoopSettings(
            steps=run.trainer.steps,
            evaluate_every=evaluation.every,
            checkpoint_every=run.trainer.checkpoint_every,
            keep_checkpoints=run.trainer.keep_checkpoints,
            trajectories_every=run.tracking.trajectories_every,
            trajectories=run.tracking.trajectories,
        )
        evaluator = Evaluator(
            rollout,
            [task for tasks in evaluated for task in tasks],
            temperature=run.rollout.temperature,
            seed=evaluation.seed,
            attempts=evaluation.attempts,
            names=[names[index] for index, one in enumerate(evaluated) for _ in one] if names else [],
        )
        self.diagnostics = self._open_diagnostics()
        probe = Probe(
            policy.engine,
            policy.trainer,
            temperature=run.rollout.temperature,
            max_tokens=run.rollout.max_tokens,
        )
        scheduler = Continuous(
            host,
            player,
            limits,
            run.num_envs,
            pace_of(run),
            lambda env, number: task_sets.task(self.specs[env], run.envs[env].options, "train", run.seed, number),
            weights=[one.weight for one in run.envs],
            version=state.step,
            state=state.schedule,
            counts=state.accounting,
            replay=replay_of(run),
        )
        return TrainLoop(
            scheduler=scheduler,
            decode=policy.renderer.text,
            trainer=policy.trainer,
            channel=WeightChannel(
                policy.trainer, policy.engine, mode=PauseMode.KEEP if run.rollout.ahead else PauseMode.WAIT
            ),
            evaluator=evaluator,
            record=record,
            checkpoints=record.checkpoints,
            settings=settings,
            state=state,
            elapsed_s=self._elapsed_s,
            stop=self.stop,
            policy=SavedPolicy(
                policy_kind(run) == "tiny",
                first.id,
                first.options,
                limits.turn_tokens,
                run.renderer.model_dump(mode="json"),
                {one.id: one.options for one in reversed(others) if one.id != first.id},
            ),
            on_step=self._stepped,
            diagnostics=self.diagnostics,
            probe=probe,
            names=names,
            imitation=imitation,
            source=None if (model := run.engine.model) is None else Path(locate(model)),
        )

    def _stepped(self, number: int, values: Mapping[str, float]) -> None:
        """Warn once if engine and trainer have different number formats, with the difference that this makes."""
        sampling, learning = getattr(self.run.engine, "dtype", ""), getattr(self.run.trainer, "precision", "")
        gap_nats = values.get("sampler_gap_nats")
        is_first = not self.warned and values.get("learned_tokens", 0) > 0 and gap_nats is not None
        if is_first and sampling and learning and sampling != learning and self.run.algorithm.correction is None:
            self.warned = True
            self.display.announce(
                f"the engine computes in {sampling} and the trainer in {learning}: log-probabilities differ by "
                f"{gap_nats:.4f} nats on average; algorithm.correction makes up for it"
            )
        if self.on_step is not None:
            self.on_step(number, values)

    def _open_diagnostics(self) -> Diagnostics:
        """Return the diagnostics, with what a resumed run has recorded and found so far."""
        section = self.run.diagnostics
        formats = {getattr(self.run.engine, "dtype", ""), getattr(self.run.trainer, "precision", "")}
        return Diagnostics(
            read_rows(self.folder / METRICS),
            self._found(),
            stop_on=section.stop_on,
            dtype="float32" if formats == {"float32"} else "bfloat16",
        )

    def _found(self) -> dict[str, JSON]:
        found = self.state.facts.get("findings")
        return dict(found) if isinstance(found, dict) else {}

    def _elapsed_s(self) -> float:
        return clock.stopwatch() - self.began

    def _summary(self) -> dict[str, JSON]:
        facts = self.state.facts
        imitates = self.run.imitation.kind != "none" and "imitation" not in facts
        names = (*(["untrained"] if "untrained" in facts else []), "before", "after")
        evaluations = {name: found if isinstance(found := facts.get(name), dict) else {} for name in names}
        before, after = evaluations["before"], evaluations["after"]
        is_known = _finite(before.get("eval_success")) is not None
        return {
            **self._of_environments(evaluations),
            "algorithm": self.run.algorithm.preset,
            "policy": "" if self.policy is None else self.policy.description,
            **{f"{key}_{when}": _finite(values.get(key)) for key in _HELD_OUT for when, values in evaluations.items()},
            "eval_episodes": round(played) if isinstance(played := after.get("eval_episodes"), float) else 0,
            "best_step": self.state.best_step,
            "eval_success_best" if is_known else "eval_return_best": self.state.best_success,
            "train_steps": self.state.step,
            "episodes": self.state.episodes,
            "lost_episodes": self.state.lost_episodes,
            "wall_s": round(self._elapsed_s(), 1),
            "seed": self.run.seed,
            "threads": facts.get("threads"),
            "imitation": facts.get("imitation"),
            "accounting": {**self.state.accounting},
            "diagnosis": self.diagnostics.summary(),
            "phase": "imitation" if imitates else "reinforcement",
            "stopped": self.stop.is_requested,
        }

    def _of_environments(self, evaluations: Mapping[str, Mapping[str, JSON]]) -> dict[str, JSON]:
        """Return the id of the environment, or the ids of several environments with the evaluations of each one."""
        ids: list[JSON] = [section.id for section in self.run.envs]
        if len(ids) == 1:
            return {"env_id": ids[0]}
        environments: dict[str, JSON] = {
            name: {
                f"{key}_{when}": _finite(values.get(f"{key}/{name}"))
                for key in _HELD_OUT
                for when, values in evaluations.items()
            }
            for name in names_of(self.run)
        }
        return {"env_ids": ids, "environments": environments}


_LARGE_BYTES = 100_000_000
"""Size of checkpoints from which a run says how much disk they take."""

_HELD_OUT = ("eval_success", "eval_greedy", "eval_return")


def _finite(value: JSON) -> JSON:
    """Return `value`, but None for the mean of no values, such as the success that an environment does not report."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
