"""A peer in a process of its own, run by the interpreter of the peers' virtual environment.

    PYTHONPATH=benchmarks .venv/bench/bin/python -m games.peer_process NAME [ARGUMENT ...]

The names are those of `peers.PEERS`. Standard input and output carry one JSON text a line. The first output is
``{"missing": REASON}``, or ``{}`` once the peer is warm. Then ``{"cpu_s": SECONDS}`` is answered with the rate of a
turn, in units per CPU second of this process, and ``{}`` with the first levels that were made. The process ends with
its input.
"""

from __future__ import annotations

import json
import os
import sys

from games.peers import PEERS, Maker
from timing import turns


def main(name: str, *arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        peer = PEERS[name](*arguments)
    except ImportError as error:
        answer({"missing": str(error)})
        return
    take = turns(peer.play if isinstance(peer, Maker) else peer)
    answer({})
    for line in sys.stdin:
        order = json.loads(line)
        if "cpu_s" in order:
            answer(take(order["cpu_s"]))
        else:
            answer(peer.kept if isinstance(peer, Maker) else [])


if __name__ == "__main__":
    main(*sys.argv[1:])
