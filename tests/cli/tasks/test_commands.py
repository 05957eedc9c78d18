"""``envkit tasks ENV COMMAND``: commands from the signatures of functions, and those that every environment has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import pytest
import typer

import envkit
from envkit import registry
from envkit.protocols import SandboxPool
from envkit.types import CommandResult, SandboxSpec
from tests.checks.guessing import Guess
from tests.cli.commands import called


async def measure(
    words: Annotated[list[str], typer.Argument(metavar="WORD...")],
    *,
    length: Annotated[int, typer.Option(min=1, help="Letters to count.")] = 3,
    sandboxes: SandboxPool,
    data: Mapping[str, Path],
    announce: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> CommandResult:
    """Measure words. Exit with 1 if there are two."""
    async with sandboxes.lease(SandboxSpec()) as sandbox:
        echoed = await sandbox.exec(["echo", *words])
    announce(f"in {', '.join(data)}")
    progress(len(words), len(words))
    rows = [(word, str(min(length, len(word)))) for word in words]
    return CommandResult([echoed.stdout.strip(), [("WORD", "LENGTH"), *rows]], is_ok=len(words) != 2)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    commands = {"measure": f"{__name__}:measure"}
    envkit.register("Words-v0", f"{Guess.__module__}:Guess", commands=commands, data={"guesses": "none:none"})


@pytest.mark.bwrap
@pytest.mark.parametrize(("words", "code"), [(("some",), 0), (("some", "text"), 1)])
def test_a_command_has_the_signature_of_its_function_and_gets_the_rest_from_wiring(
    words: tuple[str, ...], code: int
) -> None:
    found, output, errors = called("tasks", "Words-v0", "measure", *words, "--length", "2", "--backend", "local")
    assert found == code
    assert output.splitlines() == [" ".join(words), "WORD  LENGTH", *(f"{word}  2" for word in words)]
    assert errors.splitlines()[1] == "in guesses"
    assert f"measure {len(words)}/{len(words)}" in errors


def test_the_help_lists_the_environments_and_the_commands_of_each() -> None:
    assert "  Words-v0" in called("tasks", "--help")[1]
    listed = called("tasks", "Words-v0", "--help")[1]
    assert all(f"\n  {name} " in listed for name in ("ls", "show", "check", "measure"))
    shown = called("tasks", "Words-v0", "measure", "--help")[1]
    assert "Measure words." in shown
    assert "--backend" in shown
    assert not any(name in shown for name in ("sandboxes", "announce", "progress"))
    assert called("tasks", "Wrods-v0", "--help")[::2] == (
        *(2, "no environment is called 'Wrods-v0'; did you mean 'Words-v0'?\n"),
    )


FIX_AND_NOP = "--player=oracle --player=nop --repeat=1 --retry"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("check-task --count 1 Words-v0", "tasks Words-v0 check --count 1"),
        ("swe packages", "tasks SWE-v0 packages"),
        (
            "swe verify DIR",
            f"tasks SWE-v0 check --option=tasks=DIR --split=any --count=0 {FIX_AND_NOP}",
        ),
        ("terminal check DIR", "tasks Terminal-v0 ls DIR"),
        ("terminal export --family none DIR", "tasks Terminal-v0 export --family none DIR"),
    ],
)
def test_an_old_spelling_does_the_same_and_names_the_new_one(old: str, new: str) -> None:
    code, output, errors = called(*old.split())
    first, _, rest = errors.partition("\n")
    assert first.endswith(f" is now: envkit {new}")
    assert (code, output, rest) == called(*new.split())


def test_a_former_option_of_check_works_and_names_the_new_one() -> None:
    _, output, errors = called("tasks", "Words-v0", "check", "--tasks", "2")
    assert errors.splitlines()[0] == "--tasks is now --count 2; the folder of the tasks is --option tasks=DIR"
    assert output == called("tasks", "Words-v0", "check", "--count", "2")[1]


def test_options_may_come_before_the_command() -> None:
    after = called("tasks", "Questions-v0", "show", "0", "--split", "train", "--option", "match=exact")
    assert after[0] == 0
    assert called("tasks", "Questions-v0", "--split", "train", "--option", "match=exact", "show", "0") == after


def test_a_task_is_shown_as_its_players_get_it() -> None:
    code, output, _ = called("tasks", "FrozenLake-v0", "show", "3", "--option", "size=4")
    assert code == 0
    assert output.startswith("task 3 of FrozenLake-v0\n\nstatement:\nYou are on a frozen lake.")
    assert "\n\nlegal moves:\nup, down, left, right\n" in output
    assert "\nsize              4\n" in output


@pytest.mark.bwrap
def test_a_shown_task_with_a_shell_has_its_files() -> None:
    output = called("tasks", "SWE-v0", "show", "0", "--backend", "local")[1]
    assert "\nfiles:\n/workspace/repo\n" in output
    assert "pyproject.toml" in output
    assert "\nbash: " in output
    assert "max_turns          100\n" in output
