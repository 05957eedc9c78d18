"""Builders of the data that WebShop needs; see `envkit.registry.EnvSpec.data`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from envkit.runs.printable import counted

from .generate import generate
from .loaders import read_products
from .store import write_catalogue

_SEED = 0
"""Seed of the generated catalogues, so the small ones are the first products of the large one."""


def _generate(folder: Path, announce: Callable[[str], None], count: int) -> None:
    announce(f"generating {count:,} products")
    write_catalogue(folder, generate(count, _SEED), source=f"generated {count} {_SEED}", announce=announce)


webshop = partial(_generate, count=10_000)
webshop_1k = partial(_generate, count=1_000)
webshop_100k = partial(_generate, count=100_000)


def webshop_files(folder: Path, announce: Callable[[str], None], source: Path) -> None:
    """Read the products from files of the original or of its minimal package; see `read_products`.

    Products that cannot be read are left out, and listed in the file ``left-out.txt``.
    """
    left_out: list[str] = []
    write_catalogue(folder, read_products(source, left_out), source=f"files {source}", announce=announce)
    if left_out:
        (folder / "left-out.txt").write_text("\n".join(left_out) + "\n", encoding="utf-8")
        announce(
            f"left out {counted(len(left_out), 'product')} that cannot be read; left-out.txt in the data's folder "
            "lists them"
        )
