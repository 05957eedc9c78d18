"""Compares the shop's parity rules with recorded cases of the original: ``python -m ...webshop.parity FILE...``.

A file has JSON lines, plain or compressed with gzip, of one kind; its first line tells which:

reward cases     goal, product, options, price and the nouns of both titles, with the expected score
search results   a query with the expected products, best first
episodes         a goal, and for each action the expected reward, address, text, rich text and available actions,
                 until an action that made the original's server fail
goals            goals of the original with their places in its order
prices           one object with the prices by product id

All but rewards need the catalogue of the recording: the original's files in the folder of the file, or else the 1,000
generated products with which envkit's recordings were made. For each file, the program prints how many cases are
equal. It exits with 1 if any case differs, and with 2 if a file cannot be compared.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from envkit.errors import EnvkitError, UsageError

from . import pages
from .catalogue.loaders import read_products
from .catalogue.store import Catalogue, open_catalogue, write_catalogue
from .goals import NO_CAP, Goal, original_goals, original_prices
from .products import Product
from .rewards import original_score
from .rules import OriginalRules
from .session import Session

_RECORDED = Path(__file__).with_name("reference")
_MAX_SHOWN = 5
_TOLERANCE = 1e-9
"""Allowed difference of a reward, which sums floats."""

Row = Mapping[str, Any]
Difference = str
"""What differs in a case; empty if the case is equal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare files, print the counts, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m envkit.environments.webshop.parity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recorded cases, as JSON lines")
    parser.add_argument("--catalogue", type=Path, metavar="FOLDER", help="folder with the original's product files")
    chosen = parser.parse_args(arguments)
    codes = {0}
    with TemporaryDirectory(prefix="envkit-webshop-") as scratch:
        open_folder = cache(partial(_open, Path(scratch)))
        for file in chosen.files:
            try:
                codes.add(0 if _compare(file, partial(open_folder, chosen.catalogue or _beside(file))) else 1)
            except EnvkitError as error:
                print(f"{file}: {error}", file=sys.stderr)
                codes.add(2)
    return max(codes)


def _beside(file: Path) -> Path:
    """Return the folder of a file if it has a catalogue, or else the one of envkit's recordings."""
    return file.parent if any(file.parent.glob("*items_shuffle*.json*")) else _RECORDED


def read_rows(file: Path) -> list[Row]:
    """Return the objects of a file of JSON lines, plain or compressed.

    Raises:
        UsageError: The file cannot be read, or a line is no JSON object.
    """
    try:
        content = file.read_bytes()
        lines = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UsageError(f"line {number} is not valid JSON: {error}") from None
            if not isinstance(rows[-1], dict):
                raise UsageError(f"line {number} is no object")
    if not rows:
        raise UsageError("has no cases")
    return rows


def _compare(file: Path, open_shop: Callable[[], _Shop]) -> bool:
    rows = read_rows(file)
    compare: Callable[[Row], Difference]
    if "expect" in rows[0]:
        kind, compare = "rewards", compare_reward
    elif "hits" in rows[0] or "error" in rows[0]:
        kind, compare = "searches", partial(compare_search, open_shop().catalogue)
    elif "steps" in rows[0]:
        kind, compare = "episodes", partial(_compare_episode, open_shop())
    elif "goal_options" in rows[0]:
        kind, compare = "goals", partial(_compare_goal, open_shop().goals)
    elif len(rows) == 1 and all(isinstance(price, float) for price in rows[0].values()):
        kind, compare = "prices", partial(_compare_price, open_shop().prices)
        rows = [{asin: price} for asin, price in rows[0].items()]
    else:
        raise UsageError(f"no known kind of cases: has the keys {', '.join(sorted(rows[0])[:10])}")
    equal = 0
    for number, row in enumerate(rows, 1):
        try:
            difference = compare(row)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError(f"case {number} is malformed: {type(error).__name__}: {error}") from None
        equal += not difference
        if difference and number - equal <= _MAX_SHOWN:
            print(f"{file}: case {number}: {difference}", file=sys.stderr)
    print(f"{file.name}: {kind} {equal}/{len(rows)}")
    return equal == len(rows)


class _Shop:
    """A catalogue with the prices of the recording."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._products = [catalogue.product(number) for number in range(len(catalogue))]
        self._rng = Random(0)
        self.prices = original_prices(self._products, self._rng)
        self.rules = OriginalRules(self.prices)

    @cached_property
    def goals(self) -> Sequence[Goal]:
        return original_goals(self._products, self.prices, "synthetic", self._rng)


def _open(scratch: Path, folder: Path) -> _Shop:
    target = scratch / str(len(list(scratch.iterdir())))
    target.mkdir()
    write_catalogue(target, read_products(folder), source=str(folder), announce=lambda _: None)
    return _Shop(open_catalogue(target))


def compare_reward(row: Row) -> Difference:
    """Compare the score of a purchase, and its parts."""
    bought, expected = row["product"], row["expect"]
    product = Product(
        asin=bought["asin"],
        title=bought["Title"],
        query=bought["query"],
        category="",
        path=bought["product_category"],
        description=bought["Description"],
        bullets=tuple(bought["BulletPoints"]),
        attributes=tuple(bought["Attributes"]),
    )
    nouns = row["nouns"]["goal"], row["nouns"]["product"]
    score = original_score(_goal_of(row["goal"]), product, row["options"], row["price"], nouns)
    found: dict[str, float] = {
        "reward": score.total,
        "r_type": score.type,
        "title_score": score.title,
        "query_match": score.same_query,
        "category_match": score.same_category,
        "r_price": score.price,
        "r_att": score.attributes / len(row["goal"]["attributes"]),
        "r_option": score.options / max(1, len(row["goal"]["goal_options"])),
    }
    return _first(
        f"{name} {found[name]!r} instead of {want!r}"
        for name, want in expected.items()
        if name in found and abs(found[name] - want) > _TOLERANCE
    )


def compare_search(catalogue: Catalogue, row: Row) -> Difference:
    """Compare the order of the results of a search."""
    want = [asin for asin, _ in row.get("hits", ())]
    found = [catalogue.product(number).asin for number in catalogue.search(row["query"], 50)]
    return _first(
        f"query {row['query']!r}: result {place} is {a} instead of {b}"
        for place, (a, b) in enumerate(zip(found + [""] * len(want), want + [""] * len(found), strict=False), 1)
        if a != b
    )


def _compare_episode(shop: _Shop, row: Row) -> Difference:
    session = Session(shop.catalogue, _goal_of(row["goal"]), shop.rules)
    name = row["reset"]["url"].rpartition("/")[2]
    difference = _compare_page(session, name, row["reset"])
    for number, step in enumerate(row["steps"], 1):
        if difference or "raises" in step:  # a search that the original's server does not survive
            break
        session.act(step["action"])
        difference = _compare_page(session, name, step)
        reward = session.score.total if session.score else 0.0
        if abs(reward - step["reward"]) > _TOLERANCE or (session.page == "done") != step["done"]:
            difference = difference or f"reward {reward} instead of {step['reward']}"
        difference = difference and f"step {number}, {step['action']!r}: {difference}"
    return difference


def _compare_page(session: Session, name: str, want: Row) -> Difference:
    found = {
        "text": pages.text(session),
        "text_rich": pages.rich_text(session),
        "url": pages.url(session, name),
        "available": {"has_search_bar": session.can_search, "clickables": session.clickables()},
    }
    return _first(f"{key} {got!r} instead of {want[key]!r}" for key, got in found.items() if got != want[key])


def _compare_goal(goals: Sequence[Goal], row: Row) -> Difference:
    found, want = goals[row["index"]], _goal_of(row)
    return "" if found == want else f"goal {row['index']} is {found} instead of {want}"


def _compare_price(prices: Mapping[str, float], row: Row) -> Difference:
    return _first(f"{asin}: {prices[asin]} instead of {price}" for asin, price in row.items() if prices[asin] != price)


def _goal_of(row: Row) -> Goal:
    options = row["goal_options"]
    return Goal(
        asin=row["asin"],
        instruction=row.get("instruction_text", ""),
        attributes=tuple(row["attributes"]),
        options=options if isinstance(options, dict) else tuple(options),
        cap=row.get("price_upper", NO_CAP),
        query=row["query"],
        title=row["name"],
        path=row["product_category"],
        category=row["category"],
    )


def _first(differences: Iterable[Difference]) -> Difference:
    return next(iter(differences), "")


if __name__ == "__main__":
    raise SystemExit(main())
