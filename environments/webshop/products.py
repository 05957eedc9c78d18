"""Products of the shop."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

SEARCH = "Search"
BACK = "Back to Search"
PREVIOUS = "< Prev"
NEXT = "Next >"
BUY = "Buy Now"
DETAILS = ("Description", "Features", "Reviews")
"""The labels of the shop's buttons."""

_LABELS = frozenset(label.lower() for label in (SEARCH, BACK, PREVIOUS, NEXT, BUY, *DETAILS))


class Instruction(msgspec.Struct, frozen=True):
    """An instruction that a person wrote for a product, without a price; and the attributes and values it asks for."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] = ()


class Product(msgspec.Struct, frozen=True, omit_defaults=True):
    """A product, with the fields of the original shop after its loader has cleaned them.

    Attributes:
        asin: Id of ten upper-case letters and digits.
        title: Name.
        query: Search that led to the product, such as ``women's slippers``; in lower case.
        category: One of beauty, electronics, fashion, garden and grocery.
        path: Categories from the widest to the narrowest, joined by " › "; may be empty.
        description: Long text; may be empty.
        bullets: Short texts, at least one, which may be empty.
        prices: No price, one price, or the lowest and the highest price; in dollars.
        options: Values that a buyer can choose, by the name of the option; names and values are in lower case.
        attributes: Properties such as ``machine wash``.
        instruction: Sentence that asks for such a product; empty if the product is no goal.
        instruction_attributes: The attributes in `instruction`.
        human: Instructions that people wrote.
    """

    asin: str
    title: str
    query: str
    category: str
    path: str
    description: str = ""
    bullets: tuple[str, ...] = ("",)
    prices: tuple[float, ...] = ()
    options: Mapping[str, tuple[str, ...]] = {}
    attributes: tuple[str, ...] = ()
    instruction: str = ""
    instruction_attributes: tuple[str, ...] = ()
    human: tuple[Instruction, ...] = ()

    @property
    def price_tag(self) -> str:
        """The price as pages show it, such as ``$12.9`` or ``$10.99 to $25.0``; ``$100.0`` if it has no price."""
        return " to ".join(f"${price}" for price in self.prices) or "$100.0"

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """The values that can be clicked, by option; not those that a later option or a button has, too."""
        names = {value: name for name, values in self.options.items() for value in values}
        found = {
            name: tuple(value for value in values if names[value] == name and value not in _LABELS)
            for name, values in self.options.items()
        }
        return {name: values for name, values in found.items() if values}

    @property
    def human_goals(self) -> tuple[Instruction, ...]:
        """Those of the people's instructions that ask for attributes, and only for options that the product has."""
        values = {value for values in self.choices.values() for value in values}
        return tuple(one for one in self.human if one.attributes and values.issuperset(one.options))

    @property
    def document(self) -> str:
        """The text that a search looks at: title, description, first bullet and options, in lower case."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, self.bullets[0], options]).lower()
