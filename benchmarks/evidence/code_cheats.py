"""Play 15 programming tasks of levels 1 to 6 with the oracle, the nop and every cheat, in both modes, on each backend.

The oracle must succeed in all of its 20 episodes per task, and the others must earn nothing. Cheats whose result may
depend on timing play each task 5 times. Docker runs its default image.

    python benchmarks/evidence/code_cheats.py

Requires bubblewrap and Docker with the default image or a base. A part of five tasks takes about a minute.
"""

from __future__ import annotations

import sys
from functools import partial

from record import Evidence, parser
from record.players import play

from envkit_cheats.code import CHEATS

NAME = "code-cheats"
STALE_AFTER = ("cheats", "environments/code", "environments/tasks", "environments/tools", "envkit/checks/tasks.py")
TWIN = "tests/environments/code/test_cheats.py::test_the_oracle_earns_1_and_every_cheat_0"
BACKENDS = ("local", "docker")
MODES = ("answer", "tools")
TASKS = 15
PER_PART = 5
REPEAT = 20


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--backend", choices=BACKENDS, action="append", help="play only on this backend; repeatable")
    arguments.add_argument("--tasks", type=int, default=TASKS, help=f"number of tasks, a multiple of {PER_PART}")
    asked = arguments.parse_args()
    racy = [name for name, cheat in CHEATS.items() if cheat.is_racy]
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    for backend in asked.backend or BACKENDS:
        for first in range(0, asked.tasks, PER_PART):
            for mode in MODES:
                part = f"{backend}, {mode}, tasks {first} to {first + PER_PART - 1}"
                call = partial(
                    play,
                    "Code-v0",
                    range(first, first + PER_PART),
                    options={"mode": mode, "level": [1, 6]},
                    repeat=REPEAT,
                    backend=backend,
                    racy=racy,
                )
                figures = evidence.part(part, call)
                print(part, figures, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
