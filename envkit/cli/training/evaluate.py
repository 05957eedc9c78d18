"""``envkit eval``: measure how well a policy plays."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from envkit.cli.environments.options import EnvOptions, read_options
from envkit.errors import OptionError, UsageError

if TYPE_CHECKING:
    from envkit.trainer_bridge.evaluation.statistics import Estimate, Stratum
    from envkit.types import Options
    from envkit.wiring.evaluation.evaluate import Evaluation
    from envkit.wiring.evaluation.report import EvaluationFolder

_NAMES = {
    "action_is_valid": "valid answers",
    "action_is_effective": "effective actions",
    "answers_cut_off": "answers cut off",
}
_SHARES = ("success", *_NAMES)


def evaluate(
    env_id: Annotated[str, typer.Argument(metavar="ENV", help="A registered environment; see envkit list.")],
    policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="random, expert, checkpoint:DIR (a training run), model:NAME-OR-PATH (a language model in this "
            "process), openai:MODEL@URL (an OpenAI-compatible server), mini_swe:MODEL@URL (the same with the prompts "
            "and loop of mini-swe-agent), a player of the environment (oracle, nop), or NAME or NAME:TEXT for a player "
            "of a package.",
        ),
    ],
    episodes: Annotated[
        int | None,
        typer.Option(min=1, metavar="COUNT", help="Number of tasks.  [default: 512, or all if there are fewer]"),
    ] = None,
    attempts: Annotated[
        int, typer.Option(min=1, metavar="COUNT", help="Episodes per task; above 1, pass@k is reported too.")
    ] = 1,
    seed: Annotated[
        int, typer.Option(min=0, metavar="SEED", help="Seed of the tasks; by default the same as in training files.")
    ] = (1_000_003),
    option: EnvOptions = None,
    tasks: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of tasks, for environments that play such folders: all its tasks."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="train|validation|eval|any",
            help="Play only levels of this split.  [default: eval; any with --tasks]",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Play on the server (envkit serve) at this address.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="auto|local|docker|process", help="Sandboxes of an environment that uses them as tools."),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(metavar="MODEL@URL", help="Judge of an environment that needs one.")
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always take a language model's most likely token instead of sampling.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="X", help="Sampling temperature of a language model; 0 is greedy.  [default: 1]"),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System prompt; by default the chat template decides.")
    ] = None,
    turn_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="Maximum tokens per answer.  [default: 128]")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="Maximum turns per episode.  [default: 16]")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="COUNT", help="Maximum tokens of prompt and answer (model, checkpoint).  [default: 2048]"
        ),
    ] = None,
    history: Annotated[
        str | None, typer.Option(metavar="all|COUNT", help="Most recent turns to keep in the prompt.  [default: all]")
    ] = None,
    thinking: Annotated[
        Literal["keep", "cut"] | None, typer.Option(help="Keep or cut thoughts of earlier turns in the prompt.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Device of a model in this process.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Concurrent episodes (model, checkpoint); fewer need less memory.  [default: 16]",
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="Concurrent requests (openai, mini_swe).  [default: 16]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Save episodes, results and a plot here; if interrupted, repeat the command to continue.",
        ),
    ] = None,
    dialogues: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write successful episodes here, for warmup.kind: dialogues."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the evaluation that is already in the folder.")
    ] = False,
) -> None:
    """Measure how well a policy plays. Prints the mean and the 95 % interval of each metric."""
    if force and output is None:
        raise UsageError("--force replaces the evaluation in the folder --output; add --output, or leave out --force")
    from envkit.wiring import api

    options = read_options(option or ())
    if tasks is not None:
        options["tasks"] = str(tasks)
    split = split or ("eval" if tasks is None else "any")
    folder = None
    if output is not None:
        from envkit.wiring.evaluation.report import EvaluationFolder

        folder = EvaluationFolder(output, force=force)
    with _split_hint(split, options), _resume_hint(folder):
        found = api.evaluate(
            env_id,
            policy,
            episodes=episodes,
            attempts=attempts,
            seed=seed,
            options=options,
            split=split,
            url=url,
            backend=backend,
            judge=judge,
            greedy=greedy,
            temperature=temperature,
            system=system,
            turn_tokens=turn_tokens,
            max_turns=max_turns,
            max_tokens=max_tokens,
            history=_history(history),
            thinking=thinking,
            device=device,
            batch=batch,
            concurrency=concurrency,
            output=folder,
            dialogues=dialogues,
        )
    _print(found, as_json=as_json)
    if dialogues is not None:
        typer.echo(f"written: {dialogues}", err=as_json)
    if folder is not None:
        typer.echo(f"written: {', '.join(map(str, folder.files))}", err=as_json)
        if not found.levels:
            typer.echo(f"no plot: {env_id} does not report both success and shortest solutions", err=as_json)
        if found.void:
            typer.echo("to play the lost episodes again, repeat the command", err=as_json)


def _history(text: str | None) -> int | Literal["all"] | None:
    if text is None:
        return None
    if text == "all":
        return "all"
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"--history: must be all or a whole number of at least 1, got {text!r}")
    return int(text)


@contextmanager
def _resume_hint(folder: EvaluationFolder | None) -> Iterator[None]:
    """If an error ends a ``with`` block, print the command that resumes the evaluation."""
    try:
        yield
    except BaseException:
        if folder is not None and folder.count:
            words = shlex.join(["envkit", *(word for word in sys.argv[1:] if word != "--force")])
            typer.echo(f"{folder.count} finished episodes are saved in {folder.path}; continue with: {words}", err=True)
        raise


@contextmanager
def _split_hint(split: str, options: Options) -> Iterator[None]:
    """If an environment rejects the split, add a remedy to the error: the user may only have used --split's default."""
    try:
        yield
    except OptionError as error:
        if error.option != "split" or "split" in options:
            raise
        raise UsageError(f"--split {split}: {error.reason}; use --split any") from None


def _print(found: Evaluation, *, as_json: bool) -> None:
    if as_json:
        import orjson

        typer.echo(orjson.dumps(found.as_json()))
        return
    from envkit.wiring.evaluation.evaluate import MAX_STRATA

    times = f" ({found.attempts} attempts at each task)" if found.attempts > 1 else ""
    earlier = f", {found.resumed} of them earlier" if found.resumed else ""
    typer.echo(f"{found.policy} on {found.env_id}: {found.episodes} episodes{times} in {found.seconds:.1f} s{earlier}")
    if found.void:
        by_agent = f" ({found.void_by_agent} of them by programs in their sandbox)" if found.void_by_agent else ""
        typer.echo(f"{found.void} more were lost{by_agent} and do not count: {found.error}")
    _table([("", "mean", "95 % interval"), *(_row(name, estimate) for name, estimate in found.metrics.items())])
    if count := found.usage.completions:
        used = found.usage
        typer.echo(
            f"{count:,} answers: {used.prompt_tokens:,} tokens read, {used.completion_tokens:,} written, "
            f"{used.seconds / count:.2f} s per answer"
        )
    if found.levels:
        typer.echo("success by shortest solution")
        head = ("moves", "mean", "95 % interval", "episodes")
        _table([head, *(_stratum(one) for one in found.by_difficulty(most=MAX_STRATA))])


def _table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows, with the first column aligned left and all other columns aligned right."""
    width = max(len(name) for name, *_ in rows)
    for name, mean, interval, *rest in rows:
        typer.echo("  ".join([f"  {name:<{width}}", f"{mean:>8}", f"{interval:>16}", *(f"{one:>9}" for one in rest)]))


def _row(name: str, estimate: Estimate) -> tuple[str, str, str]:
    is_share = name in _SHARES or name.startswith("pass@")
    mean, low, high = (f"{value:.1%}" if is_share else f"{value:.2f}" for value in estimate)
    return _NAMES.get(name, name.replace("_", " ")), mean, f"{low} – {high}"


def _stratum(one: Stratum) -> tuple[str, str, str, str]:
    moves = str(one.shortest) if one.shortest == one.longest else f"{one.shortest}-{one.longest}"
    _, mean, interval = _row("success", one.success)
    return moves, mean, interval, str(one.episodes)
