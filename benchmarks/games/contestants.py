"""Contestants of the game benchmarks. envkit runs in this process, each peer in a child process (`peer_process.py`)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import settings

_BENCHMARKS = Path(__file__).parents[1]
_PYTHON = _BENCHMARKS.parent / ".venv" / "bench" / "bin" / "python"

ContestantT = TypeVar("ContestantT")


class MissingPeerError(Exception):
    """A peer is not installed, or its checkout was not given."""


class Peer:
    """A peer in a separate process and virtual environment. It is callable as a `timing.Turn`.

    Args:
        settings: The parsed command line; see `parser`.
        name: Name of the peer in `peers.PEERS`.
        arguments: Arguments of the peer; None means a checkout that was not given.

    Raises:
        MissingPeerError: The peer is not installed, or its checkout was not given.
    """

    def __init__(self, settings: argparse.Namespace, name: str, *arguments: object) -> None:
        if None in arguments:
            raise MissingPeerError(f"give its checkout with --{name.partition('_')[0]} PATH")
        if not settings.peers.exists():
            raise MissingPeerError(f"there is no {settings.peers}; make .venv/bench/done")
        self._name = name
        command = [str(settings.peers), "-m", "games.peer_process", name, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(_BENCHMARKS)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if reason := self._answer().get("missing"):
            self.close()
            raise MissingPeerError(reason)

    def __call__(self, cpu_s: float) -> float:
        return float(self._ask({"cpu_s": cpu_s}))

    def levels(self) -> list[str]:
        """Return the first levels that the peer generated."""
        return list(self._ask({}))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, order: dict[str, float]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        sys.exit(f"{self._name} ended with exit code {self._process.wait()}; its error is above")


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser for the arguments of the game benchmarks."""
    parser = settings.parser(about)
    parser.add_argument("--peers", type=Path, default=_PYTHON, metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--roll", type=Path, metavar="PATH", help="checkout of ROLL; by default, ROLL is left out")
    parser.add_argument("--ragen", type=Path, metavar="PATH", help="checkout of RAGEN; by default, RAGEN is left out")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of which the median counts")
    parser.add_argument("--round-cpu-s", type=float, default=0.4, help="minimum CPU seconds per contestant and round")
    return parser


@contextmanager
def taking_part(starts: Mapping[str, Callable[[], ContestantT]]) -> Iterator[dict[str, ContestantT]]:
    """Start the contestants, and end their processes after the block. Missing peers are left out, with a message."""
    with ExitStack() as stack:
        started = {}
        for name, start in starts.items():
            try:
                one = start()
            except MissingPeerError as error:
                print(f"  left out: {name}: {error}")
                continue
            if isinstance(one, Peer):
                stack.callback(one.close)
            started[name] = one
        yield started
