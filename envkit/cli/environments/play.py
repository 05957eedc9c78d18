"""``envkit play``: play an environment at the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.environments.options import EnvId, EnvOptions, read_options
from envkit.cli.tables import echo
from envkit.errors import UsageError

if TYPE_CHECKING:
    from envkit.cli.environments.game import Game


def play(
    env_id: EnvId,
    option: EnvOptions = None,
    seed: Annotated[int, typer.Option(min=0, metavar="SEED", help="Seed of the first level.")] = 0,
    split: Annotated[
        str, typer.Option(metavar="train|validation|eval|any", help="Play only levels of this split.")
    ] = "any",
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Play on the server (envkit serve) at this address.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser", help="Play in a browser, if the environment has pages.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port for --browser. 0: any free port.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="With --browser, only print the address.")] = False,
) -> None:
    """Play an environment yourself.

    On a terminal you play with keys; the last line on the screen lists them. Without a terminal, each line of the input
    is an action. With --browser, you play on the environment's own pages, until you press Ctrl-C.
    """
    from envkit.cli.environments.game import open_game

    if browser:
        from envkit.cli.environments.browser import play_in_browser

        if url is not None:
            raise UsageError("--browser: a server has no pages; leave out --browser or --url")
        with open_game(env_id, options=read_options(option or ()), split=split, render_mode="html") as game:
            play_in_browser(game, seed, port=port, is_opened=not no_open)
        return
    with open_game(env_id, options=read_options(option or ()), split=split, url=url) as game:
        if not _is_screen():
            _play_lines(game, seed)
            return
        from rich.console import Console

        from envkit.cli.environments.keyboard import keyboard
        from envkit.cli.environments.screen import play_on_screen

        with keyboard(sys.stdin.fileno()) as keys:
            play_on_screen(game, seed, Console(file=sys.stdout, highlight=False), keys)


def _is_screen() -> bool:
    """Whether input and output are a terminal that can redraw a board and read single keys (only on Unix)."""
    is_dumb = os.environ.get("TERM", "dumb").lower() in ("dumb", "unknown")
    return _is_terminal() and not is_dumb and find_spec("termios") is not None


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _play_lines(game: Game, seed: int) -> None:
    """Play one episode. Each line of the input is an action; empty lines are skipped."""
    scene = game.begin(seed)
    echo(scene.text)
    for line in _lines():
        if not line.strip():
            continue
        scene = game.act(game.answer(line))
        echo(scene.text)
        echo(f"reward {scene.reward:g}")
        if scene.end is not None:
            echo(f"{scene.end}: turns {scene.turns}, return {scene.total:g}")
            return


def _lines() -> Iterable[str]:
    """Yield the lines of standard input. On a terminal, print a prompt before each line is read."""
    prompt = "> " if _is_terminal() else ""
    echo(prompt, end="")
    for line in sys.stdin.buffer:
        yield line.decode(errors="replace").rstrip("\r\n")
        echo(prompt, end="")
