"""The keys of a configuration file: its pydantic models, and the values to which a test changes their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from envkit.config.grammar import Section, put
from envkit.config.kinds import FAMILIES, ByKind, find


@dataclass(frozen=True, slots=True)
class Leaf:
    """A key without keys below it.

    Attributes:
        name: The key with the kind of each section that may be of several kinds, such as ``engine[vllm].url``.
        default: Its default; None also if it is required.
        annotation: Its type.
    """

    name: str
    default: object
    annotation: Any

    @property
    def key(self) -> str:
        """The key without kinds."""
        return ".".join(part.partition("[")[0] for part in self.name.split("."))

    def other(self) -> object:
        """Return a value that differs from the default.

        Raises:
            LookupError: The type does not say which; a test has to.
        """
        if isinstance(self.default, bool):
            return not self.default
        if isinstance(self.default, int):
            return self.default + 1
        if isinstance(self.default, float):
            return self.default / 2 or 0.5
        if get_origin(self.annotation) is Literal:
            return next((one for one in get_args(self.annotation) if one != self.default), "unknown")
        raise LookupError(f"{self.name}: no other value is known; give one")


def leaves(section: type[Section], prefix: str = "") -> Iterator[Leaf]:
    """Yield each key of a section and of the sections in it; a section in two places counts in both."""
    for name, field in section.model_fields.items():
        inner = list(_sections([field.annotation, *field.metadata]))
        several = len({one for one, _ in inner}) > 1
        for one, kind in inner:
            yield from leaves(one, f"{prefix}{name}{f'[{kind}]' if several else ''}.")
        if not inner or any(
            mark.may_be_name for mark in [*_marks(field.annotation), *field.metadata] if isinstance(mark, ByKind)
        ):
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            yield Leaf(f"{prefix}{name}", default, field.annotation)


def put_leaf(content: Mapping[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return `content` with another value of one key; a list of sections gets it in its first one."""
    parts = key.split(".")
    changed: dict[str, Any] = dict(content)
    if len(parts) > 1 and isinstance(changed.get(parts[0]), list):
        first, *others = changed[parts[0]]
        changed[parts[0]] = [put_leaf(first, ".".join(parts[1:]), value), *others]
    elif len(parts) > 1:
        changed[parts[0]] = put_leaf(changed.get(parts[0]) or {}, ".".join(parts[1:]), value)
    else:
        put(changed, key, value)
    return changed


def _marks(annotation: Any) -> Iterator[ByKind]:
    for one in get_args(annotation):
        if isinstance(one, ByKind):
            yield one
        yield from _marks(one)


def _sections(annotations: Any) -> Iterator[tuple[type[Section], str]]:
    """Yield the section classes that may be the value of a key, or an entry of its list, each with a kind."""
    marks = [one for one in annotations if isinstance(one, ByKind)]
    for mark in marks:
        found: dict[type[Section], str] = {}
        for name in FAMILIES[mark.family].built_in:
            found.setdefault(find(mark.family, name).section, name)
        yield from found.items()
    for one in () if marks else annotations:
        if isinstance(one, type) and issubclass(one, Section):
            yield one, ""
        elif get_origin(one) is Annotated or get_args(one):
            yield from dict(_sections(get_args(one))).items()
