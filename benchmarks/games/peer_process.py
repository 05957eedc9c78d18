"""A process that runs one peer with the interpreter of the peers' virtual environment.

    PYTHONPATH=benchmarks .venv/bench/bin/python -m games.peer_process NAME [ARGUMENT ...]

NAME is a key of `peers.PEERS`. Standard input and output carry one JSON value per line. The first output is
``{"missing": REASON}``, or ``{}`` once the peer is ready. After that, the reply to ``{"cpu_s": SECONDS}`` is the speed
during these CPU seconds of this process, in steps or levels per CPU second. The reply to ``{}`` is the first levels
that the peer generated. The process ends when its input ends.
"""

from __future__ import annotations

import json
import os
import sys

from games.peers import PEERS, Maker
from timing import turns


def main(name: str, *arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # print to stderr: peers write to stdout

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
