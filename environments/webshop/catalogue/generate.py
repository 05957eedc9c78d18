"""The generated catalogue: products made from a closed vocabulary.

Products come in families of one to five near-duplicates, which share their kind, brand and most words but differ in an
attribute, the values of an option or the price. So the first hit of a search often is not what the instruction asks
for, and reading the pages decides. Shares, numbers of options and attributes, lengths of titles and prices follow the
statistics of 1,000 products of the original shop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from envkit.types import stable_hash

from ..products import Instruction, Product
from . import words
from .words import Kind

_Item = TypeVar("_Item")


def _spread(weights: dict[int, int]) -> tuple[int, ...]:
    """Return each key as often as its weight says."""
    return tuple(value for value, weight in weights.items() for _ in range(weight))


_FAMILY_SIZES = _spread({1: 40, 2: 20, 3: 18, 4: 12, 5: 10})
_OPTION_COUNTS = _spread({0: 58, 1: 25, 2: 14, 3: 3})
_VALUE_COUNTS = _spread({1: 8, 2: 34, 3: 30, 4: 26, 5: 24, 6: 24, 7: 14, 8: 18, 10: 20, 14: 9, 20: 6, 45: 1})
_ATTRIBUTE_COUNTS = _spread({0: 19, 1: 19, 2: 19, 3: 13, 4: 13, 5: 7, 6: 4, 7: 3, 8: 2, 10: 1})
_TITLE_LENGTHS = _spread({7: 10, 10: 10, 13: 14, 16: 14, 19: 14, 23: 14, 27: 12, 31: 10, 35: 6})
_BULLET_COUNTS = _spread({1: 14, 3: 9, 4: 12, 5: 57, 6: 5, 7: 3})
_SENTENCE_COUNTS = _spread({0: 30, 1: 8, 2: 12, 3: 14, 4: 12, 5: 10, 6: 6, 7: 4, 8: 4})
_WANTED_COUNTS = _spread({1: 30, 2: 40, 3: 22, 4: 8})
_CENTS = (0.99, 0.99, 0.99, 0.95, 0.49, 0.0, 0.89, 0.5)
_KINDS_OF = {category: tuple(kind for kind in words.KINDS if kind.category == category) for category in words.SHARES}
_CATEGORIES = tuple(category for category, share in words.SHARES.items() for _ in range(share))
_MISSPELLED_SHARE = 0.05
"""Chance of a misspelling, for each word that has one."""

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ASINS: int = 36**8
_STRIDE = 1_732_050_807_569
"""Has no factor in common with `_ASINS`, so that multiples of it are distinct."""

# Words after which an adjective cannot stand in front of its noun, as in "easy to clean".
_BACK_WORDS = frozenset(
    (
        "to",
        "without",
        "with",
        "in",
        "for",
        "of",
        "from",
        "against",
        "by",
        "only",
        "made",
        "good",
        "after",
        "one",
        "able",
    )
)


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


@dataclass(frozen=True)
class _Sentence:
    """A sentence about feature number `feature`, and the words that fill its template."""

    template: str
    feature: int
    slots: dict[str, str]


@dataclass(frozen=True)
class _Model:
    """A product before it is written down. Near-duplicates are made from one model.

    Attributes:
        features: The attributes, and after them what the texts mention although it is not among the attributes.
        attributes: Number of attributes.
        title: Words, and numbers of features.
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
        for member in range(dice.one(_FAMILY_SIZES)):
            if number == count:
                return
            yield _product(dice, _near_duplicate(dice, model) if member else model, _asin(first_asin, number))
            number += 1


def _asin(first: int, number: int) -> str:
    """Return the id of product `number`. The ids of a catalogue are distinct."""
    rest = (first + number * _STRIDE) % _ASINS
    text = ""
    for _ in range(8):
        rest, digit = divmod(rest, 36)
        text += _DIGITS[digit]
    return "B0" + text


def _model(dice: _Dice) -> _Model:
    kind = dice.one(_KINDS_OF[dice.one(_CATEGORIES)])
    marked = dice.one(kind.nouns)
    noun = marked.removeprefix("~")
    count = dice.one(_ATTRIBUTE_COUNTS)
    features = _compatible(dice.some(kind.attributes, count + 4))
    count = min(count, len(features))
    features = features[: count + 1 + int(dice.random() * 2)]
    brand = "".join(dice.one(words.SYLLABLES) for _ in range(3 if dice.chance(0.1) else 2)).capitalize()
    # Each text goes on with the feature after the last one mentioned, so that most features are mentioned somewhere.
    shown = dice.some(range(len(features)), min(len(features), int(dice.random() * 4)))
    order = [*(index for index in range(len(features)) if index not in shown), *shown]

    def sentences(templates: Sequence[str], number: int) -> list[_Sentence]:
        made = []
        for template in dice.some(templates, number):
            slots = _slots(dice, kind, marked, brand)
            made.append(_Sentence(template, order[0], slots))
            if "ttribute}" in template or "ATTRIBUTE}" in template:
                order.append(order.pop(0))
        return made

    bullet_count = dice.one(_BULLET_COUNTS)
    bullets = [] if bullet_count == 1 and dice.chance(0.5) else sentences(words.BULLETS, bullet_count)
    description = sentences(words.DESCRIPTIONS, dice.one(_SENTENCE_COUNTS))
    if dice.chance(0.9):
        mention = _Sentence(dice.one(words.MENTIONS), 0, _slots(dice, kind, marked, brand))
        if description and dice.chance(0.4):
            description.insert(0, mention)
        else:
            first = bullets[0] if bullets else replace(mention, template="")
            bullets[:1] = [replace(first, template=f"{first.template} {mention.template}".strip())]
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
        if not any(feature in group and not set(group).isdisjoint(kept) for group in words.EXCLUSIVE):
            kept.append(feature)
    return tuple(kept)


def _slots(dice: _Dice, kind: Kind, marked: str, brand: str) -> dict[str, str]:
    noun = marked.removeprefix("~")
    is_plural = noun != marked and noun.endswith("s")
    adjective = dice.one(words.ADJECTIVES[kind.category])
    extra = dice.one(words.EXTRAS[kind.category])
    return {
        "noun": noun,
        "brand": brand,
        "query": kind.query,
        "this": "these" if is_plural else "this",
        "is": "are" if is_plural else "is",
        "adjective": adjective,
        "an_adjective": _with_article(adjective),
        "An_adjective": _with_article(adjective).capitalize(),
        "people": dice.one(words.PEOPLE),
        "extra": extra,
        "EXTRA": extra.upper(),
    }


def _title(dice: _Dice, kind: Kind, noun: str, brand: str, shown: Sequence[int]) -> tuple[str | int, ...]:
    """Return words, and numbers of the features in `shown`; about as long as a title of the original shop."""
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
    """Return values of an option, in the order of the pool."""
    chosen = set(dice.some(range(len(pool)), dice.one(_VALUE_COUNTS)))
    return tuple(value for index, value in enumerate(pool) if index in chosen)


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
        model = replace(model, price=_price(dice, model.kind))
    if dice.chance(0.4):
        model = _swap_values(dice, model)
    if dice.chance(0.5) or model == original:
        model = replace(model, price=int(model.price * (0.7 + 0.8 * dice.random())) + dice.one(_CENTS))
    return model


def _swap_attribute(dice: _Dice, model: _Model) -> _Model:
    """Replace an attribute, in all texts, by one that excludes it or by another one of the kind."""
    features = list(model.features)
    index = int(dice.random() * model.attributes)
    rivals = {name for group in words.EXCLUSIVE if features[index] in group for name in group}
    others = [name for name in model.kind.attributes if name not in features]
    candidates = [name for name in others if name in rivals] or others
    rest = features[:index] + features[index + 1 :]
    features[index] = next(
        (name for name in dice.some(candidates, 8) if len(_compatible([*rest, name])) == len(features)), features[index]
    )
    return replace(model, features=tuple(features))


def _swap_values(dice: _Dice, model: _Model) -> _Model:
    """Draw the values of one option again; about half of them stay."""
    if not model.options:
        return model
    name = dice.one(tuple(model.options))
    kept = {value for value in model.options[name] if dice.chance(0.5)}
    kept.update(_values(dice, model.kind.options[name])[: max(1, len(model.options[name]) - len(kept))])
    values = tuple(value for value in model.kind.options[name] if value in kept)
    return replace(model, options={**model.options, name: values})


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
    text = sentence.template.format(**sentence.slots, attribute=lead + feature, ATTRIBUTE=feature.upper())
    return text[0].upper() + text[1:]


def _misspell(dice: _Dice, text: str) -> str:
    """Replace a few words by one of their misspellings."""
    found = text.split(" ")
    for index, word in enumerate(found):
        misspellings = words.MISSPELLINGS.get(word.lower())
        if misspellings and dice.chance(_MISSPELLED_SHARE):
            wrong = dice.one(misspellings)
            found[index] = wrong.upper() if word.isupper() else wrong.capitalize() if word[0].isupper() else wrong
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
            is_behind = (all_behind and not mark) or not _BACK_WORDS.isdisjoint(text.split())
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
