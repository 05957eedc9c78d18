"""A training file in, a trained policy out."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from envkit import clock, config
from envkit.config import RunConfig
from envkit.errors import ConfigError, EnvkitError, UsageError
from envkit.protocols import EnvHost
from envkit.trainer_bridge import checkpoint
from envkit.trainer_bridge.checkpoint import RunState
from envkit.trainer_bridge.display import Display
from envkit.trainer_bridge.loop import Evaluator, LoopSettings, TrainLoop
from envkit.trainer_bridge.record import RunRecord
from envkit.trainer_bridge.rollout import Rollout
from envkit.types import JSON, Options, Task, Trajectory
from envkit.wiring import envs
from envkit.wiring.checks import check, check_docker
from envkit.wiring.meanings import algorithm_of, limits_of, resolve, task_of
from envkit.wiring.sandboxes import sandbox_host

if TYPE_CHECKING:
    from envkit.wiring.policy import Policy


async def train(run: RunConfig, folder: Path, *, resume: bool, force: bool, display: Display) -> dict[str, JSON]:
    """Train as `run` says and leave everything in `folder`.

    The first SIGINT or SIGTERM ends the run after a checkpoint of the last finished train step; a second one is not
    caught.

    Returns:
        What is in ``summary.json``; with ``"stopped": true`` when a signal ended it.

    Raises:
        ConfigError: `check` found something.
        UsageError: The folder, model or checkpoint cannot be used as asked.
    """
    problems = [*check(run), *await check_docker(run)]
    if problems:
        raise ConfigError(problems)
    run = resolve(run)
    newest: Path | None = None
    state = RunState()
    if resume:
        newest = checkpoint.latest(folder / "checkpoints")
        state = checkpoint.load_state(newest)
    elif not force:
        RunRecord.refuse_taken(folder)
    try:
        return await _Run(run, folder, display, state, newest, force=force).finish()
    except BaseExceptionGroup as group:
        raise _first_cause(group) from None
    finally:
        display.close()


class CheckpointPlayer:
    """Plays with the weights of a checkpoint, under the limits of its run."""

    def __init__(self, policy: Policy, run: RunConfig) -> None:
        self._policy = policy
        self._run = run

    def options_for(self, env_id: str) -> Options:
        """Return the environment's options that it was trained with; none for another environment."""
        return self._run.env.options if env_id == self._run.env.id else {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return tokens as text; see `envkit.protocols.Renderer.text`."""
        return self._policy.renderer.text(token_ids)

    async def play(
        self,
        host: EnvHost,
        tasks: Sequence[Task],
        *,
        greedy: bool,
        attempts: int = 1,
        on_episode: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Play every task `attempts` times in a row; `on_episode` is called after each episode, finished or void."""
        run = self._run
        rollout = Rollout(host, self._policy.engine, self._policy.renderer, limits_of(run), run.env.num_envs)
        heat = 0.0 if greedy else run.rollout.temperature
        seed = run.evaluation.seed
        played = await rollout.groups(tasks, attempts, temperature=heat, seed=seed, on_episode=on_episode)
        return played.trajectories


@asynccontextmanager
async def open_checkpoint_player(folder: Path) -> AsyncIterator[CheckpointPlayer]:
    """Open the checkpoint in `folder`: a run's folder (its newest checkpoint) or one of its checkpoints.

    Raises:
        UsageError: There is no checkpoint.
    """
    from envkit.wiring.policy import device_of, load_policy

    place = checkpoint.latest(folder / "checkpoints") if (folder / "checkpoints").is_dir() else folder
    if not (place / "policy" / "config.json").is_file():
        raise UsageError(f"{folder}: neither a run's folder nor a checkpoint; name one such as runs/NAME")
    run = config.load(place.parent.parent / "config.yaml")
    engine = run.engine
    load = partial(
        load_policy,
        str(place / "policy"),
        device=device_of(engine.device),
        dtype=engine.dtype,
        batch_tokens=engine.batch_tokens,
    )
    yield CheckpointPlayer(await clock.to_thread(load), run)


class _Run:
    """One call of `train`."""

    def __init__(
        self, run: RunConfig, folder: Path, display: Display, state: RunState, newest: Path | None, *, force: bool
    ) -> None:
        self._run = run
        self._force = force
        self._folder = folder
        self._display = display
        self._state = state
        self._newest = newest
        self._spec = envs.find(run.env.id)
        self._policy: Policy | None = None
        self._record: RunRecord | None = None
        self._stopped = False
        self._began = clock.stopwatch()
        self._before_s = state.wall_s

    async def finish(self) -> dict[str, JSON]:
        """Train to the end or until a signal, and return the summary."""
        with ExitStack() as opened:
            async with anyio.create_task_group() as tasks:
                scope = anyio.CancelScope()
                tasks.start_soon(self._stop_on_signal, scope)
                with scope:
                    await self._play_and_learn(opened)
                tasks.cancel_scope.cancel()
            summary = self._summary()
            if self._record is not None:
                self._record.summary(summary)
                await clock.to_thread(self._record.plots)
            return summary

    async def _play_and_learn(self, opened: ExitStack) -> None:
        """Do it all. Whatever can refuse comes before a run in the folder is replaced, so that none is lost in vain."""
        from envkit.wiring.policy import open_policy

        if self._newest is not None:
            self._record = opened.enter_context(closing(self._open_record()))
        policy = self._policy = await clock.to_thread(open_policy, self._run)
        self._display.say(f"policy: {policy.description}")
        async with self._host() as host:
            if self._record is None:
                self._record = opened.enter_context(closing(self._open_record()))
            record = self._record
            await self._warm_up(policy, record)
            loop = self._loop(policy, host, record)
            try:
                await loop.run(self._display)
            finally:
                # Stopped, or the sandboxes gave out: what was learned until then is worth keeping.
                with anyio.CancelScope(shield=True):
                    await loop.save()

    def _open_record(self) -> RunRecord:
        text, tensorboard = config.dump(self._run), self._run.tracking.tensorboard
        if self._newest is None:
            return RunRecord.create(self._folder, text, force=self._force, tensorboard=tensorboard)
        return RunRecord.resume(self._folder, text, step=self._state.step, tensorboard=tensorboard)

    async def _stop_on_signal(self, scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                self._stopped = True
                self._display.say("stopping; once more ends at once, without a checkpoint")
                scope.cancel()
                return

    async def _warm_up(self, policy: Policy, record: RunRecord) -> None:
        """Make the policy ready for reinforcement, or restore what an earlier part of the run made.

        A checkpoint stands before and after, so that a run that is stopped in its warm-up can be continued too: it then
        makes the same warm-up again.
        """
        from envkit.wiring.warmup import warm_up

        weights = record.folder / "weights"
        begin = partial(policy.begin_training, algorithm_of(self._run), self._run, weights)
        keep = partial(checkpoint.save, record.checkpoints, keep=self._run.trainer.keep_checkpoints)
        needed = self._run.warmup.kind == "demonstrations" and "warmup" not in self._state.facts
        begin()
        if self._newest is None:
            await clock.to_thread(keep, policy.trainer, self._state)
        elif not needed:
            policy.trainer.restore(str(self._newest))
        if needed:
            facts = await warm_up(self._run, self._spec, policy, weights / "warmup.safetensors", self._display)
            self._state.facts["warmup"] = facts
            begin()  # once more: a critic and a reference start from what was learned
            await clock.to_thread(keep, policy.trainer, self._state)

    @asynccontextmanager
    async def _host(self) -> AsyncIterator[EnvHost]:
        section = self._run.sandbox
        per_box = -(-self._run.env.num_envs // section.boxes)
        async with sandbox_host(
            section.kind,
            boxes=section.boxes,
            slots_per_box=per_box,
            health=section.health,
            restarts=section.restarts,
            call_timeout_s=self._run.rollout.timeout_s,
            announce=self._display.say,
        ) as host:
            yield host

    def _loop(self, policy: Policy, host: EnvHost, record: RunRecord) -> TrainLoop:
        run = self._run
        rollout = Rollout(host, policy.engine, policy.renderer, limits_of(run), run.env.num_envs)
        evaluation = run.evaluation
        tasks = [task_of(run, self._spec, "eval", evaluation.seed, number) for number in range(evaluation.episodes)]
        settings = LoopSettings(
            steps=run.trainer.steps,
            groups_per_step=run.trainer.groups_per_step,
            group_size=run.rollout.group_size,
            temperature=run.rollout.temperature,
            seed=run.seed,
            evaluate_every=evaluation.every,
            checkpoint_every=run.trainer.checkpoint_every,
            keep_checkpoints=run.trainer.keep_checkpoints,
            trajectories_every=run.tracking.trajectories_every,
            trajectories=run.tracking.trajectories,
        )
        evaluator = Evaluator(rollout, tasks, temperature=run.rollout.temperature, seed=evaluation.seed)
        return TrainLoop(
            rollout=rollout,
            engine=policy.engine,
            trainer=policy.trainer,
            evaluator=evaluator,
            tasks=lambda number: task_of(run, self._spec, "train", run.seed, number),
            record=record,
            checkpoints=record.checkpoints,
            settings=settings,
            state=self._state,
            elapsed_s=self._elapsed_s,
        )

    def _elapsed_s(self) -> float:
        return self._before_s + clock.stopwatch() - self._began

    def _summary(self) -> dict[str, JSON]:
        facts = self._state.facts
        before, after = facts.get("before"), facts.get("after")
        before = before if isinstance(before, dict) else {}
        after = after if isinstance(after, dict) else {}
        return {
            "env_id": self._run.env.id,
            "algorithm": self._run.algorithm.preset,
            "policy": "" if self._policy is None else self._policy.description,
            "eval_success_before": before.get("eval_success"),
            "eval_success_after": after.get("eval_success"),
            "eval_greedy_before": before.get("eval_greedy"),
            "eval_greedy_after": after.get("eval_greedy"),
            "eval_episodes": round(played) if isinstance(played := after.get("eval_episodes"), float) else 0,
            "train_steps": self._state.step,
            "episodes": self._state.episodes,
            "lost_episodes": self._state.lost_episodes,
            "wall_s": round(self._elapsed_s(), 1),
            "seed": self._run.seed,
            "warmup": facts.get("warmup"),
            "stopped": self._stopped,
        }


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of envkit's own in a group, else the group's first leaf."""
    leaves = list(_leaves(group))
    return next((leaf for leaf in leaves if isinstance(leaf, EnvkitError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
