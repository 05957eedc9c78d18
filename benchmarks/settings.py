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
        parser: Of everything else.
        quick: Defaults with ``--quick``: the smallest with which all of the program runs.
    """
    said = "the smallest setting: shows that the program runs; its figures mean nothing, and no claim fails it"
    parser.add_argument("--quick", action="store_true", help=said)
    if "--quick" in sys.argv:
        parser.set_defaults(**quick)
    return parser.parse_args()
