"""The cost of the gateway: sandboxes over HTTP, compared with ROCK, and environment steps, compared with OpenEnv.

Run it with the interpreter that has the peers, ``.venv/sandboxes/bin/python``; a missing peer is left out. Two
images must exist: ``--image`` for sandboxes, and ``--games-image``, which ``envkit image build games`` makes.
"""

from __future__ import annotations

import os
from functools import partial

from servers.fleet_sandboxes import sandboxes
from servers.fleet_steps import BY_CLIENTS, BY_LEAN, BY_POST, steps, steps_before_and_after
from settings import parsed, parser
from waiting import Claim, Findings

from envkit import clock

_OPENENV = ["OpenEnv"]
"""OpenEnv with an environment written as in its guide. In `_ASYNC`, the environment also has async methods."""
_ASYNC = ["OpenEnv, async"]

CLAIMS = (
    Claim("warm lease", "envkit", at_most=20),
    Claim("8 cold starts at once", "envkit", at_most=2500),
    Claim("true", "envkit", at_most=4),
    Claim("step of a shell", "envkit", at_most=2),
    Claim("steps of 16 shells", "envkit", at_least=20, peers=["ROCK"]),
    Claim("impossible request", "envkit", at_most=50),
    Claim(BY_CLIENTS, "envkit", at_least=4, peers=_OPENENV),
    Claim(BY_CLIENTS, "envkit", peers=_ASYNC),
    Claim(BY_CLIENTS, "envkit, lists of frames", at_least=20, peers=_OPENENV),
    Claim(BY_CLIENTS, "envkit, lists of frames", peers=_ASYNC),
    Claim(BY_LEAN, "envkit, lists of frames", at_least=20, peers=_OPENENV),
    Claim(BY_LEAN, "envkit, lists of frames", peers=_ASYNC),
    Claim(BY_LEAN, "envkit", at_least=4, peers=_OPENENV),
    Claim(BY_LEAN, "envkit", peers=_ASYNC),
    Claim(BY_POST, "envkit", at_least=1, peers=["Starlette"]),
)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--image", default="envkit/base:bookworm", help="image of all sandboxes")
    arguments.add_argument("--games-image", default="envkit/games:1", help="image of the sandbox with environments")
    arguments.add_argument("--only", choices=["sandboxes", "steps"], help="measure this part alone")
    arguments.add_argument(
        "--before",
        metavar="PYTHON",
        help="interpreter of another checkout: compare only the steps of its server with ours",
    )
    arguments.add_argument("--starts", type=int, default=20, help="number of warm leases, and of refused requests")
    arguments.add_argument("--calls", type=int, default=200, help="number of single calls per contestant")
    arguments.add_argument("--rounds", type=int, default=5, help="rounds of which the median counts")
    arguments.add_argument("--round-s", type=float, default=2, help="seconds per round with many callers")
    arguments.add_argument("--rock-s", type=float, default=70, help="seconds to wait for ROCK's refusal")
    settings = parsed(arguments, starts=2, calls=5, rounds=1, round_s=0.2, rock_s=1)
    findings = Findings()
    print(f"{len(os.sched_getaffinity(0))} processors, load average before: {os.getloadavg()[0]:.1f}")
    if settings.before is not None:
        clock.run(
            partial(steps_before_and_after, findings, settings.before, settings.rounds, settings.round_s), fast=True
        )
        return
    if settings.only != "steps":
        print("Sandboxes")
        clock.run(partial(sandboxes, findings, settings), fast=True)
    if settings.only != "sandboxes":
        print("Steps")
        clock.run(partial(steps, findings, settings.rounds, settings.round_s), fast=True)
    print(f"Load average after: {os.getloadavg()[0]:.1f}")
    findings.check(CLAIMS, is_strict=not settings.quick)


if __name__ == "__main__":
    main()
