"""The generated catalogue: products made from a closed vocabulary.

Products come in families of one to five near-duplicates, which share their kind, brand and most words but differ in an
attribute, the values of an option or the price. So the first hit of a search often is not what the instruction asks
for, and a buyer has to read the pages. A family lies in one split, so that no test goal has a near-duplicate among the
training goals. Shares, numbers of options and attributes, lengths of titles and prices follow the statistics of 1,000
products of the original shop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from envkit.types import stable_hash

from ...split import split_of
from ..products import Instruction, Product
from . import words
from .words import Kind

_Item = TypeVar("_Item")


def _spread(weights: dict[int, int]) -> tuple[int, ...]:
    """Return a tuple that contains each key as often as its weight says."""
    return tuple(value for value, weight in weights.items() for _ in range(weight))


_FAMILY_SIZES = _spread({1: 30, 2: 20, 3: 20, 4: 15, 5: 15})
_OPTION_COUNTS = _spread({0: 58, 1: 25, 2: 14, 3: 3})
_VALUE_COUNTS = _spread({1: 8, 2: 34, 3: 30, 4: 26, 5: 24, 6: 24, 7: 14, 8: 18, 10: 20, 14: 9, 20: 6, 45: 1})
_ATTRIBUTE_COUNTS = _spread({0: 19, 1: 19, 2: 19, 3: 13, 4: 13, 5: 7, 6: 4, 7: 3, 8: 2, 10: 1})
_SHOWN_COUNTS = _spread({0: 25, 1: 45, 2: 30})
_TITLE_LENGTHS = _spread({7: 10, 10: 10, 13: 14, 16: 14, 19: 14, 23: 14, 27: 12, 31: 10, 35: 6})
_BULLET_COUNTS = _spread({1: 14, 3: 9, 4: 12, 5: 57, 6: 5, 7: 3})
_SENTENCE_COUNTS = _spread({0: 30, 1: 8, 2: 12, 3: 14, 4: 12, 5: 10, 6: 6, 7: 4, 8: 4})
_WANTED_COUNTS = _spread({1: 30, 2: 40, 3: 22, 4: 8})
_CENTS = (0.99, 0.99, 0.99, 0.95, 0.49, 0.0, 0.89, 0.5)
_KINDS_OF = {category: tuple(kind for kind in words.KINDS if kind.category == category) for category in words.SHARES}
_CATEGORIES = tuple(category for category, share in words.SHARES.items() for _ in range(share))
_WORDS_BETWEEN = 14
"""One of up to this many words is misspelled, if it has a misspelling."""

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ASINS: int = 36**8
_MAX_PRODUCTS = 10**9
"""Larger numbers give the ids that replace those of another split."""
_STRIDE = 1_732_050_807_569
"""Has no factor in common with `_ASINS`, so that multiples of it are distinct."""


class _Dice:
    """Draws that give the same results in every Python version: all come from `Random.random`."""

    def __init__(self, seed: int) -> None:
        self.random: Callable[[], float] = Random(seed).random

    def chance(self, share: float) -> bool:
        return self.random() < share

    def one(self, items: Sequence[_Item]) -> _Item:
        return items[int(self.random() * len(items))]

    def some(self, items: Sequence[_Item], count: int) -> list[_Item]:
        """Return up to `count` different items in random order."""
        pool = list(items)
        count = min(count, len(pool))
        for index in range(count):
            other = index + int(self.random() * (len(pool) - index))
            pool[index], pool[other] = pool[other], pool[index]
        return pool[:count]


class _Sentence(NamedTuple):
    """A sentence about the feature of this number. Its name replaces {attribute} and {ATTRIBUTE} in `text`."""

    text: str
    feature: int


class _Model(NamedTuple):
    """A product before its texts are written. Near-duplicates are made from the same model.

    Attributes:
        features: The attributes, followed by other features that the texts mention.
        attributes: Number of attributes.
        title: The title, as words, and numbers that stand for features.
    """

    kind: Kind
    noun: str
    path: str
    features: tuple[str, ...]
    attributes: int
    title: tuple[str | int, ...]
    title_is_capitalized: bool
    bullets: tuple[_Sentence, ...]
    description: tuple[_Sentence, ...]
    options: dict[str, tuple[str, ...]]
    price: float


def generate(count: int, seed: int) -> Iterator[Product]:
    """Yield the first `count` products of the catalogue of `seed`; no product depends on `count`."""
    dice = _Dice(stable_hash("WebShop catalogue", seed))
    first_asin = stable_hash("WebShop asins", seed) % _ASINS
    number = 0
    while number < count:
        model = _model(dice)
        size = dice.one(_FAMILY_SIZES)
        asin = _asin(first_asin, number)
        split = split_of(asin) if size > 1 else None
        for member in range(min(size, count - number)):
            candidate = number
            while member and split_of(asin := _asin(first_asin, candidate)) != split:
                candidate += _MAX_PRODUCTS
            yield _product(dice, _near_duplicate(dice, model) if member else model, asin)
            number += 1


def _asin(first: int, number: int) -> str:
    """Return the id of a number; different numbers below `_ASINS` have different ids."""
    rest = (first + number * _STRIDE) % _ASINS
    text = "B0"
    for _ in range(8):
        rest, digit = divmod(rest, 36)
        text += _DIGITS[digit]
    return text


def _model(dice: _Dice) -> _Model:
    kind = dice.one(_KINDS_OF[dice.one(_CATEGORIES)])
    marked = dice.one(kind.nouns)
    noun = marked.removeprefix("~")
    count = dice.one(_ATTRIBUTE_COUNTS)
    features = _compatible(dice.some(kind.attributes, count + 4))
    count = min(count, len(features))
    features = features[: count + 1 + int(dice.random() * 2)]
    brand = "".join(dice.one(words.SYLLABLES) for _ in range(3 if dice.chance(0.1) else 2)).capitalize()
    shown = dice.some(range(len(features)), dice.one(_SHOWN_COUNTS))
    hidden = [index for index in range(len(features)) if index not in shown]
    # A search sees title, description and first bullet. If these mention only what the title shows, a search cannot
    # tell near-duplicates apart that differ in something else. A buyer can, from the other bullets.
    of_bullets = [*hidden, *shown]
    of_description = list(shown) if shown and dice.chance(0.7) else of_bullets

    def sentences(templates: Sequence[str], number: int, order: list[int]) -> list[_Sentence]:
        made = []
        for template in dice.some(templates, number):
            made.append(_Sentence(_fill(dice, template, kind, marked, brand), order[0]))
            if "{attribute}" in template.lower():
                order.append(order.pop(0))
        return made

    bullet_count = dice.one(_BULLET_COUNTS)
    bullets = [] if bullet_count == 1 and dice.chance(0.5) else sentences(words.BULLETS, bullet_count, of_bullets)
    description = sentences(words.DESCRIPTIONS, dice.one(_SENTENCE_COUNTS), of_description)
    if dice.chance(0.9):
        mention = _fill(dice, dice.one(words.MENTIONS), kind, marked, brand)
        if description and dice.chance(0.4):
            description.insert(0, _Sentence(mention, 0))
        else:
            first = bullets[0] if bullets else _Sentence("", 0)
            bullets[:1] = [_Sentence(f"{first.text} {mention}".strip(), first.feature)]
    names = dice.some(tuple(kind.options), dice.one(_OPTION_COUNTS))
    return _Model(
        kind=kind,
        noun=marked,
        path="" if dice.chance(0.02) else f"{kind.path} › {_capitalized(noun)}" if dice.chance(0.6) else kind.path,
        features=features,
        attributes=count,
        title=_title(dice, kind, noun, brand, shown),
        title_is_capitalized=dice.chance(0.85),
        bullets=tuple(bullets),
        description=tuple(description),
        options={name: _values(dice, kind.options[name]) for name in kind.options if name in names},
        price=_price(dice, kind),
    )


def _compatible(features: Sequence[str]) -> tuple[str, ...]:
    """Return the features without those that an earlier one excludes."""
    kept: list[str] = []
    for feature in features:
        if feature not in words.RIVALS or words.RIVALS[feature].isdisjoint(kept):
            kept.append(feature)
    return tuple(kept)


def _fill(dice: _Dice, template: str, kind: Kind, marked: str, brand: str) -> str:
    """Fill in all placeholders of a template but {attribute} and {ATTRIBUTE}, which stay."""
    noun = marked.removeprefix("~")
    is_plural = noun != marked and noun.endswith("s")
    adjective = dice.one(words.ADJECTIVES[kind.category])
    extra = dice.one(words.EXTRAS[kind.category])
    return template.format(
        noun=noun,
        brand=brand,
        query=kind.query,
        this="these" if is_plural else "this",
        are="are" if is_plural else "is",
        adjective=adjective,
        an_adjective=_with_article(adjective),
        An_adjective=_with_article(adjective).capitalize(),
        people=dice.one(words.PEOPLE),
        extra=extra,
        EXTRA=extra.upper(),
        attribute="{attribute}",
        ATTRIBUTE="{ATTRIBUTE}",
    )


def _title(dice: _Dice, kind: Kind, noun: str, brand: str, shown: Sequence[int]) -> tuple[str | int, ...]:
    """Return the words and feature numbers of a title, about as long as those of the original shop."""
    length = dice.one(_TITLE_LENGTHS)
    adjectives = dice.some(words.ADJECTIVES[kind.category], 6)
    before, after = (shown[:1], shown[1:]) if dice.chance(0.5) else ((), shown)
    parts: list[str | int] = [brand, *adjectives[: 1 + int(dice.random() * 2)], *before, noun]
    endings: list[str | int] = [*after]
    endings.append(f"for {dice.one(words.PEOPLE)}")
    endings += [f"- {extra}" for extra in dice.some(words.EXTRAS[kind.category], 3)]
    endings.append(f", {adjectives[3]} {kind.query}")
    endings.append(f"{adjectives[4]} {dice.one(kind.nouns).removeprefix('~')}")
    endings.append(f"{adjectives[5]} style")
    used = sum(part.count(" ") + 1 if isinstance(part, str) else 2 for part in parts)
    for ending in dice.some(endings, len(endings)):
        if isinstance(ending, int) or used + 2 < length:
            parts.append(ending)
            used += ending.count(" ") + 1 if isinstance(ending, str) else 2
    return tuple(parts)


def _values(dice: _Dice, pool: Sequence[str]) -> tuple[str, ...]:
    """Draw some values of an option; they keep the order of the pool."""
    return tuple(pool[index] for index in sorted(dice.some(range(len(pool)), dice.one(_VALUE_COUNTS))))


def _price(dice: _Dice, kind: Kind) -> float:
    share = dice.random()
    return int(kind.low + (kind.high - kind.low) * share * share * (0.4 + 0.6 * share)) + dice.one(_CENTS)


def _near_duplicate(dice: _Dice, model: _Model) -> _Model:
    """Return a product that differs from `model` in at least one of attribute, options and price."""
    original = model
    differs = dice.random()
    if differs < 0.55 and model.attributes:
        model = _swap_attribute(dice, model)
    elif differs < 0.8 and model.options:
        model = _swap_values(dice, model)
    else:
        model = model._replace(price=_price(dice, model.kind))
    if dice.chance(0.4):
        model = _swap_values(dice, model)
    if dice.chance(0.5) or model == original:
        model = model._replace(price=int(model.price * (0.7 + 0.8 * dice.random())) + dice.one(_CENTS))
    return model


def _swap_attribute(dice: _Dice, model: _Model) -> _Model:
    """Replace an attribute, in all texts, by one that excludes it or by another one of the kind."""
    features = list(model.features)
    index = int(dice.random() * model.attributes)
    rivals = words.RIVALS.get(features[index], frozenset())
    others = [name for name in model.kind.attributes if name not in features]
    candidates = [name for name in others if name in rivals] or others
    rest = features[:index] + features[index + 1 :]
    features[index] = next(
        (name for name in dice.some(candidates, 8) if len(_compatible([*rest, name])) == len(features)), features[index]
    )
    return model._replace(features=tuple(features))


def _swap_values(dice: _Dice, model: _Model) -> _Model:
    """Draw the values of one option again; about half of them stay."""
    if not model.options:
        return model
    name = dice.one(tuple(model.options))
    kept = {value for value in model.options[name] if dice.chance(0.5)}
    kept.update(_values(dice, model.kind.options[name])[: max(1, len(model.options[name]) - len(kept))])
    values = tuple(value for value in model.kind.options[name] if value in kept)
    return model._replace(options={**model.options, name: values})


def _product(dice: _Dice, model: _Model, asin: str) -> Product:
    kind, attributes = model.kind, model.features[: model.attributes]
    title = " ".join(part if isinstance(part, str) else model.features[part] for part in model.title)
    title = title.replace(" ,", ",")
    bullets = [_misspell(dice, _sentence(model, sentence)) for sentence in model.bullets]
    instruction = ""
    wanted: tuple[str, ...] = ()
    if attributes and dice.chance(0.51):
        wanted = tuple(dice.some(attributes, dice.one(_WANTED_COUNTS)))
        noun = kind.query if dice.chance(0.7) else model.noun
        instruction = dice.one(words.FRAMES).format(_request(dice, noun, wanted))
    human: tuple[Instruction, ...] = ()
    if attributes and dice.chance(0.185):
        human = (_human(dice, model, attributes),)
    return Product(
        asin=asin,
        title=_misspell(dice, _capitalized(title) if model.title_is_capitalized else title),
        query=kind.query,
        category=kind.category,
        path=model.path,
        description=" ".join(_sentence(model, sentence) for sentence in model.description),
        bullets=tuple(bullets) or ("",),
        prices=_prices(dice, model.price),
        options=model.options,
        attributes=attributes,
        instruction=instruction,
        instruction_attributes=wanted,
        human=human,
    )


def _sentence(model: _Model, sentence: _Sentence) -> str:
    feature = model.features[sentence.feature]
    lead = {"": "", "=": "with ", "+": "with ", "@": "good for "}[words.MARKS[feature]]
    text = sentence.text.replace("{attribute}", lead + feature).replace("{ATTRIBUTE}", feature.upper())
    return text[0].upper() + text[1:]


def _misspell(dice: _Dice, text: str) -> str:
    """Replace a few words by one of their misspellings."""
    found = text.split(" ")
    index = int(dice.random() * _WORDS_BETWEEN)
    while index < len(found):
        word = found[index]
        if wrong := words.MISSPELLINGS.get(word.lower()):
            spelling = dice.one(wrong)
            found[index] = (
                spelling.upper() if word.isupper() else spelling.capitalize() if word[0].isupper() else spelling
            )
        index += 1 + int(dice.random() * _WORDS_BETWEEN)
    return " ".join(found)


def _prices(dice: _Dice, price: float) -> tuple[float, ...]:
    kind = dice.random()
    if kind < 0.09:
        return ()
    if kind < 0.91:
        return (round(price, 2),)
    return (round(price, 2), round(int(price * (1.1 + dice.random())) + 1 + dice.one(_CENTS), 2))


def _human(dice: _Dice, model: _Model, attributes: Sequence[str]) -> Instruction:
    wanted = tuple(dice.some(attributes, min(3, dice.one(_WANTED_COUNTS))))
    chosen = {name: dice.one(values) for name, values in model.options.items() if dice.chance(0.8)}
    options = "".join(f" {dice.one(words.OPTION_PHRASES[name]).format(value)}" for name, value in chosen.items())
    thing = _request(dice, model.noun, wanted)
    text = dice.one(words.HUMAN_FRAMES).format(thing=thing, options=options)
    return Instruction(text=text, attributes=wanted, options=tuple(chosen.values()))


def _request(dice: _Dice, marked: str, wanted: Sequence[str]) -> str:
    """Return a noun with attributes around it, such as "low carb granola bars with resealable bag"."""
    phrases: dict[str, list[str]] = {"front": [], "+": [], "@": [], "back": []}
    all_behind = dice.chance(0.3)
    for name in wanted:
        mark = words.MARKS[name]
        text = dice.one(words.PARAPHRASES[name]) if name in words.PARAPHRASES and dice.chance(0.25) else name
        if mark in ("", "="):
            is_behind = (all_behind and not mark) or not words.BEHIND.isdisjoint(text.split())
            mark = "back" if is_behind else "front"
        phrases[mark].append(text)
    noun = marked.removeprefix("~")
    text = " ".join([", ".join(phrases["front"]), noun]).strip()
    is_one = noun == marked and marked not in _QUERIES
    if is_one:
        text = _with_article(text)
    if phrases["+"]:
        text += " with " + " and ".join(phrases["+"])
    if phrases["@"]:
        text += " for " + " and ".join(phrases["@"])
    if phrases["back"]:
        text += f" that {'are' if noun.endswith('s') and not is_one else 'is'} " + " and ".join(phrases["back"])
    return text


_QUERIES = frozenset(kind.query for kind in words.KINDS)


def _with_article(text: str) -> str:
    return f"an {text}" if text[0] in "aeiou" else f"a {text}"


def _capitalized(text: str) -> str:
    """Return the text with every word capitalized."""
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))
