"""``envkit play``: the drawing, the keys, and the restored terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console

from envkit.cli.environments.game import open_game
from envkit.cli.environments.keyboard import Keyboard
from envkit.cli.environments.screen import play_on_screen
from envkit.types import Options
from tests.programs.program import SCRIPT

TIMEOUT_S = 60
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\].*?\x07)")

MAP: Options = {"map": ["SFF", "FHF", "FFG"]}
MAP_WORDS = ("FrozenLake-v0", "--option", "map=[SFF, FHF, FFG]")

# Takes the terminal that is its input for its own, as a shell would have arranged, and becomes the program.
ON_ITS_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def in_lines(words: Sequence[str], typed: str | bytes, *, path: Path | None = None) -> tuple[int, str, str]:
    """Play with the lines of a pipe."""
    done = subprocess.run(
        [SCRIPT, "play", *words],
        input=typed.encode() if isinstance(typed, str) else typed,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(path or "")},
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_each_line_of_a_pipe_is_an_action_until_the_episode_ends() -> None:
    words = [*MAP_WORDS, "--option", "instructions=false"]
    code, out, err = in_lines(words, "right\n\n<answer>right</answer>\ndown\nleft\nDOWN\nup\nup\n")
    assert (code, err) == (0, "")
    assert out.split("reward 0\n") == [
        "P__\n_O_\n__G\n_P_\n_O_\n__G\n",
        "__P\n_O_\n__G\n",
        "___\n_OP\n__G\n",
        "___\n_X_\n__G\n",
        "lost: turns 4, return 0\n",
    ]


def test_the_documents_show_what_happens() -> None:
    page = Path(__file__).parents[2].joinpath("docs/play-and-evaluate.md").read_text(encoding="utf-8")
    block = page.partition("```\n$ ")[2].partition("```")[0]
    command, _, shown = block.partition("\n")
    path = f"{Path(SCRIPT).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
    )
    assert (done.stdout, done.stderr) == (shown, "")


@contextmanager
def keys_typed(typed: str) -> Iterator[Keyboard]:
    """The keyboard of a terminal at which everything was typed already."""
    with ExitStack() as opened:
        leader, follower = pty.openpty()
        for end in (leader, follower):
            opened.callback(os.close, end)
        keys = Keyboard(follower)
        tty.setcbreak(follower)
        os.write(leader, typed.encode())
        yield keys


def played(typed: str, options: Options = MAP, *, width: int = 80, height: int = 24, seed: int = 0) -> list[str]:
    """Play with keys; gives what was written, a text a picture, without escape sequences."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=height, highlight=False)
    with open_game("FrozenLake-v0", options=options) as game, keys_typed(typed) as keys:
        play_on_screen(game, seed, console, keys)
    pictures = stream.getvalue().split("FrozenLake-v0  seed ")
    return [ESCAPES.sub("", picture).replace("\r", "") for picture in pictures]


def test_the_rules_stand_once_above_the_board_and_the_keys_below() -> None:
    rules, *pictures = played("q")
    assert rules.startswith("You are on a frozen lake.")
    assert pictures[0].splitlines() == [
        "0",
        "",
        "P__",
        "_O_",
        "__G",
        "",
        "turns 0  return 0",
        "arrows, wasd, hjkl move  : answer  ? hint  r again  n next  q quit",
    ]
    assert not any("You are on" in picture for picture in pictures)


@pytest.mark.parametrize("typed", ["\x1b[C\x1b[C\x1b[B\x1b[B", "\x1bOC\x1b[1;5C\x1bOB\x1b[B", "ddss", "lljj", "dljs"])
def test_arrows_and_letters_play_a_move_at_once(typed: str) -> None:
    last = played(typed + "q")[-1]
    assert "turns 4  return 1  last reward 1  valid yes  effective yes\n" in last
    assert "solved after 4 turns; the shortest solution has 4 moves\n" in last


def test_a_line_is_typed_corrected_and_played_as_it_is_or_given_up() -> None:
    pictures = played(":I go <answer>rightt\x7f</answer>\r\r\r:up\x15right\n:down\x1bq")
    assert any(": I go <answer>rightt█" in picture for picture in pictures)
    assert "\n__P\n" in pictures[-1]
    assert "turns 2" in pictures[-1]


def test_an_invalid_answer_shows_a_message() -> None:
    expected = "turns 1  return 0  last reward 0  valid no  effective no\nYour answer could not be read"
    assert expected in "".join(played(":nonsense\rq"))


def test_a_hint_comes_from_the_expert() -> None:
    assert "hint: down or right\n" in "".join(played("?q"))
    assert "hint" not in played("?dq")[-1].replace("? hint", "")


def test_the_same_level_again_and_the_next_one() -> None:
    seeds = [picture.splitlines()[0] for picture in played("drnnq", {}, seed=4)[1:]]
    assert [seed for seed, _ in groupby(seeds)] == ["4", "5", "6"]
    assert "turns 0  return 0\n" in played("drq")[-1]


def test_after_the_end_of_an_episode_only_restart_next_and_quit_work() -> None:
    pictures = played("ddssd:?q")
    assert "turns 4" in pictures[-1]
    assert "the episode is over: r restarts it" in "".join(pictures)
    assert pictures[-1].endswith("\nr again  n next  q quit\n")


@pytest.mark.parametrize("key", ["x", "1", "\t", "\x1b[5~", "\x1bOP", "ä"])
def test_an_unknown_key_shows_a_message_until_the_next_key(key: str) -> None:
    pictures = played(f"{key}dq")
    assert "turns 0  return 0\nunknown key; the last line lists the keys\n" in "".join(pictures)
    assert "turns 1" in pictures[-1]
    assert "unknown key" not in pictures[-1]


def test_a_blocked_move_shows_a_message_and_an_effective_move_does_not() -> None:
    assert "up: the way is blocked, nothing moved\n" in "".join(played("wq"))
    assert "blocked" not in "".join(played("dq"))


def test_the_rules_name_keys_instead_of_the_answer_format() -> None:
    rules = played("q", {**MAP, "actions_per_turn": 3})[0]
    assert "<answer>" not in rules
    assert rules.rstrip().endswith("moves.\nMove with the keys below the board.")


def test_a_closed_terminal_ends_the_game() -> None:
    assert "turns 1" in played("d\x04")[-1]


@pytest.mark.parametrize(("width", "height"), [(1, 1), (4, 2), (10, 5), (20, 8), (30, 12)])
def test_a_small_terminal_gets_what_fits(width: int, height: int) -> None:
    for picture in played("?d:typed\rssq", {"size": 16, "max_moves": 100}, width=width, height=height)[1:]:
        lines = picture.splitlines()
        assert len(lines) <= max(1, height - 1) + 1
        assert all(len(line) <= width + 1 for line in lines[1:])


def test_a_terminal_that_is_too_low_shows_how_many_lines_the_board_needs() -> None:
    options: Options = {"size": 16, "max_moves": 100}
    low = played("q", options, height=12)[-1].splitlines()
    assert low[1] == "… 9 lines do not fit; the terminal needs 20 lines"
    assert len(low) == 11
    just = played("q", options, height=20)[-1]
    assert "do not fit" not in just
    assert len(just.splitlines()) == 19


class Terminal:
    """A program on a real terminal of 80 by 24."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        self._leader, self._follower = pty.openpty()
        termios.tcsetwinsize(self._follower, (24, 80))
        self._before = termios.tcgetattr(self._follower)
        self._seen = ""
        bare = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_ITS_TERMINAL, SCRIPT, "play", *words],
            stdin=self._follower,
            stdout=self._follower,
            stderr=self._follower,
            env={**bare, "TERM": "xterm-256color", **env},
        )

    def is_restored(self) -> bool:
        return termios.tcgetattr(self._follower) == self._before

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def until(self, text: str) -> str:
        """Read until `text` was shown; gives what came before it since the last call, escape sequences included."""
        while text not in self._seen:
            ready, _, _ = select.select([self._leader], [], [], TIMEOUT_S)
            assert ready, f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._leader, 1 << 16).decode(errors="replace")
        before, _, self._seen = self._seen.partition(text)
        return before

    def rest(self) -> str:
        """Read what the program, which is ending, still writes."""
        self.process.wait(TIMEOUT_S)
        while select.select([self._leader], [], [], 0)[0]:
            self._seen += os.read(self._leader, 1 << 16).decode(errors="replace")
        return self._seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._leader)
        os.close(self._follower)


@contextmanager
def terminal(*words: str, **env: str) -> Iterator[Terminal]:
    opened = Terminal(words, env)
    try:
        yield opened
    finally:
        opened.close()


def test_the_terminal_is_taken_over_for_the_game_and_given_back_at_its_end() -> None:
    with terminal(*MAP_WORDS) as screen:
        drawn = screen.until("q quit")
        assert "\x1b[?25l" in drawn  # no cursor
        assert "\x1b[38;5;" in drawn  # colours
        assert not screen.is_restored()
        screen.type("\x1b[C?q")
        assert "\x1b[?25h" in screen.rest()
        assert (screen.process.returncode, screen.is_restored()) == (0, True)


@pytest.mark.parametrize(
    ("typed", "code"),
    [("d:half a line\x03", 130), ("", 128 + signal.SIGTERM)],
)
def test_control_c_and_sigterm_leave_the_terminal_as_it_was(typed: str, code: int) -> None:
    with terminal(*MAP_WORDS) as screen:
        screen.until("q quit")
        if typed:
            screen.type(typed)
        else:
            screen.process.terminate()
        assert "\x1b[?25h" in screen.rest()
        assert (screen.process.returncode, screen.is_restored()) == (code, True)


def test_an_environment_without_legal_moves_is_played_with_typed_text(frail: Path) -> None:
    with terminal("Frail-v0", PYTHONPATH=str(frail)) as screen:
        screen.until(": answer")
        screen.type("d")
        screen.until("this environment has no move 'right'; type : and then your answer")
        screen.type("\rhello\r")
        drawn = screen.until("last reward 0.25")
        assert "You said 'hello'." in drawn
        assert "\x1b]0;" not in drawn  # an environment cannot control the terminal


def test_a_dumb_terminal_reads_lines() -> None:
    with terminal(*MAP_WORDS, TERM="dumb") as screen:
        assert "\x1b" not in screen.until("> ")
        screen.type("right\n")
        assert "_P_\r\n_O_\r\n__G\r\nreward 0\r\n" in screen.until("> ")
        screen.type("\x04")
        screen.rest()
        assert screen.process.returncode == 0
