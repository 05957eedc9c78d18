"""The generated catalogue."""

from __future__ import annotations

import hashlib
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import groupby, islice

import msgspec

from envkit.environments.split import split_of
from envkit.environments.webshop.catalogue import words
from envkit.environments.webshop.catalogue.generate import generate
from envkit.environments.webshop.products import Product

BUTTONS = {
    "buy now",
    "< prev",
    "next >",
    "back to search",
    "description",
    "features",
    "reviews",
    "attributes",
    "search",
}


@cache
def products() -> tuple[Product, ...]:
    return tuple(generate(4000, seed=3))


def share(found: Iterable[bool]) -> float:
    values = list(found)
    return sum(values) / len(values)


def lower_words(*texts: str) -> set[str]:
    return set(re.findall("[a-z]+", " ".join(texts).lower()))


def texts(product: Product) -> str:
    return " ".join([product.title, *product.bullets, product.description]).lower()


def test_the_products_of_a_seed_never_change() -> None:
    digest = hashlib.sha256(msgspec.json.encode(products()[:1000])).hexdigest()
    assert digest[:16] == "d64d4bb0d06a2792"


def test_products_are_streamed() -> None:
    stream = generate(10**9, seed=3)
    list(islice(stream, 10))
    tracemalloc.start()
    for _ in islice(stream, 1000):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 800_000  # 1,000 products take about 1.7 MB


def test_shares_follow_the_original_shop() -> None:
    found = products()
    categories = Counter(product.category for product in found)
    titles = sorted(len(product.title.split()) for product in found)
    prices = sorted(product.prices[0] for product in found if product.prices)
    values = sorted(len(values) for product in found for values in product.options.values())

    # The figures are those of 1,000 products of the original.
    for category, percent in words.SHARES.items():
        assert abs(categories[category] / len(found) - percent / 100) < 0.04
    for count, expected in enumerate((0.58, 0.25, 0.17)):
        assert abs(share(len(product.options) == count for product in found) - expected) < 0.04
    for count, expected in enumerate((0.19, 0.19, 0.19, 0.13)):
        assert abs(share(len(product.attributes) == count for product in found) - expected) < 0.04
    assert abs(share(not product.description for product in found) - 0.30) < 0.04
    assert abs(share(len(product.bullets) == 5 for product in found) - 0.56) < 0.04
    assert abs(share(not product.prices for product in found) - 0.09) < 0.02
    assert abs(share(len(product.prices) == 2 for product in found) - 0.09) < 0.02
    assert abs(share(bool(product.instruction) for product in found) - 0.415) < 0.03
    assert abs(share(bool(product.human) for product in found) - 0.15) < 0.02
    assert 16 <= titles[len(titles) // 2] <= 20
    assert 20 < prices[len(prices) // 2] < 35
    assert 150 < prices[len(prices) * 9 // 10] < 250
    assert 4 <= values[len(values) // 2] <= 5


def test_many_products_have_near_duplicates_that_differ_in_what_an_instruction_can_ask_for() -> None:
    families: dict[tuple[str, str], list[Product]] = {}
    for product in products():
        families.setdefault((product.title.split()[0], product.query), []).append(product)
    siblings = [family for family in families.values() if len(family) > 1]

    assert sum(map(len, siblings)) > 0.6 * len(products())
    differ = [len({(one.attributes, tuple(one.options.items()), one.prices) for one in family}) for family in siblings]
    assert share(count > 1 for count in differ) > 0.97


def test_near_duplicates_are_in_one_split() -> None:
    families = groupby(products(), lambda product: (product.title.split()[0], product.query))
    splits = [{split_of(product.asin) for product in family} for _, family in families]

    assert all(len(found) == 1 for found in splits)
    assert 0.7 < share(found == {"train"} for found in splits) < 0.9


def test_the_vocabulary_is_closed() -> None:
    def vocabulary(found: Iterable[Product]) -> set[str]:
        return {
            word
            for product in found
            for word in lower_words(
                product.title.split(" ", 1)[1],  # without the brand
                *product.attributes,
                *product.options,
                *(value for values in product.options.values() for value in values),
                product.instruction,
                *(human.text for human in product.human),
            )
        }

    known = vocabulary(products())

    assert len(known) < 2500
    new = Counter(word for one in generate(2000, seed=9) for word in vocabulary([one]) if word not in known)
    assert new.total() < 100  # words that are rare, not words without end


def test_instructions_ask_for_attributes_and_options_of_their_product() -> None:
    for product in products():
        assert bool(product.instruction) == bool(product.instruction_attributes)
        assert len(product.instruction_attributes) <= 4
        assert set(product.instruction_attributes) <= set(product.attributes)
        for human in product.human:
            assert human.attributes
            assert set(human.attributes) <= set(product.attributes)
            assert set(human.options) <= {value for values in product.options.values() for value in values}
            assert all(option in human.text for option in human.options)


def test_a_value_belongs_to_one_option_and_is_no_button() -> None:
    for product in products():
        values = [value for values in product.options.values() for value in values]
        assert len(values) == len(set(values))
        assert not BUTTONS & set(values)
        assert all(value and value == value.lower() for value in values)
    for kind in words.KINDS:
        pooled = [value for values in kind.options.values() for value in values]
        assert len(pooled) == len(set(pooled)), kind.query
