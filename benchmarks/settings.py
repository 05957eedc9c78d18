"""Command lines of the benchmarks."""

from __future__ import annotations

import argparse
import sys


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the text `about` as its help."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def parsed(parser: argparse.ArgumentParser, **quick: object) -> argparse.Namespace:
    """Parse the command line and add ``--quick``.

    Args:
        parser: A parser of the other arguments.
        quick: Defaults with ``--quick``: the smallest values with which the whole program runs.
    """
    message = "smallest setting: shows that the program runs; its results mean nothing, and claims are not checked"
    parser.add_argument("--quick", action="store_true", help=message)
    if "--quick" in sys.argv:
        parser.set_defaults(**quick)
    return parser.parse_args()
