"""Runs a worker of pytest-xdist as a fork of the process that has imported the slow modules: ``worker -u -c SCRIPT``.

Each of several workers would import them again, which takes more than ten processor seconds on a busy machine.
"""

from __future__ import annotations

import sys

from tests.programs.program import Program, start_server

if __name__ == "__main__":
    start_server()
    with Program([sys.executable, *sys.argv[2:]]) as worker:
        sys.exit(worker.wait())
