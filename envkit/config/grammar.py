"""Reading and checking of configuration files. Their sections are frozen objects and reject unknown keys.

Files cannot use interpolation, inheritance, class paths or environment variables. Names of keys contain units. All
problems of a file are reported together, one line for each problem, starting with the key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, Union, get_args, get_origin, runtime_checkable

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from yaml.constructor import ConstructorError

from envkit.config import wording
from envkit.errors import ConfigError, did_you_mean

UserPath = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A path of the user; ``~`` at its start is the home folder."""
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(gt=0)]


_INTEGER = r"[-+]?[0-9]+(?:_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+"
_FLOAT = (
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


_OTHER_NAMES: Mapping[str, str] = {
    "lr": "trainer.learning_rate",
    "batch_size": "trainer.groups_per_step",
    "num_steps": "trainer.steps",
    "beta": "algorithm.kl.coefficient",
    "max_new_tokens": "rollout.turn_tokens",
}
"""Names of settings in other libraries, with the keys of envkit."""


class _Numbers:
    """Numbers as YAML 1.2 and people write them: ``1e-1`` is one, and ``12:30`` and ``010`` are not 750 and 8."""

    yaml_implicit_resolvers: ClassVar[Any] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Loader(_Numbers, yaml.SafeLoader):
    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        text = node.value.replace("_", "").lower()
        if re.fullmatch(_INTEGER, text):
            try:
                return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
            except ValueError:  # Python's limit, since the conversion takes quadratic time
                raise ConstructorError(None, None, "an integer with too many digits", node.start_mark) from None
        value: float = self.construct_yaml_float(node)
        return int(value) if "e" in text and value.is_integer() else value  # 2e3 is a number of tokens


class _Dumper(_Numbers, yaml.SafeDumper):
    pass


for _kind, _pattern in (("int", _INTEGER), ("float", _FLOAT)):
    _tag = f"tag:yaml.org,2002:{_kind}"
    for _reader in (_Loader, _Dumper):
        _reader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), list("-+.0123456789"))
    _Loader.add_constructor(_tag, _Loader.construct_number)


def read_yaml(text: str) -> Any:
    """Return the content of a YAML text, in which `1e-1` is a number.

    Raises:
        yaml.YAMLError: The text is not YAML.
    """
    return _loaded(text)[0]


def write_yaml(content: Any) -> str:
    """Return `content` as a YAML text that `read_yaml` reads."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class Section(BaseModel):
    """A section of a file. The key of an optional section may have no value in YAML; the section then has defaults."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    removed: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions without the indexes of lists, such as ``a.b``, with what to do instead."""

    @classmethod
    def completed(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a section with the values that it leaves to other keys, such as a preset's."""
        return content

    @model_validator(mode="before")
    @classmethod
    def _without_empty_ones(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        content = cls.completed(content)
        fields = {name: field for name, field in cls.model_fields.items() if not field.is_required()}
        empty = {name for name in fields if content.get(name, "") is None and _holds_sections(fields[name].annotation)}
        return {name: value for name, value in content.items() if name not in empty}


def _holds_sections(annotation: Any) -> bool:
    """Return whether the value of a key is a section or a list of sections."""
    inner = [get_args(one)[0] if get_origin(one) is Annotated else one for one in get_args(annotation) or (annotation,)]
    return all(isinstance(one, type) and issubclass(one, Section) for one in inner)


@runtime_checkable
class SectionChoice(Protocol):
    """Annotation of a key whose content decides about the class of its section."""

    def section_of(self, content: object) -> type[Section] | None:
        """Return the class of the section with this content; None if it is unknown."""
        ...


Root = TypeVar("Root", bound=Section)


def content_of(path: Path, *, example: str) -> dict[str, Any]:
    """Return the content of a file.

    Args:
        path: A YAML file.
        example: An example of such a file's content, which the error about an empty file quotes.

    Raises:
        ConfigError: The file cannot be read, or has a duplicate key.
    """
    try:
        content, duplicates = _loaded(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {wording.yaml_problem(error)}"]) from None
    if duplicates:
        raise ConfigError(
            f"{path}: line {second}: duplicate key {key} (first in line {first}); remove one of the two"
            for key, first, second in duplicates
        )
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: must hold keys and values, such as '{example}'"])
    return content


def override(content: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply ``"a.b=value"`` strings with YAML values to `content`.

    Raises:
        ConfigError: A string is malformed.
    """
    for one in overrides:
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise ConfigError([f"{one}: must have the form section.key=value"])
        try:
            read, duplicates = _loaded(value)
        except yaml.YAMLError:
            raise ConfigError([f"{key}: {value!r} is not YAML"]) from None
        if duplicates:
            raise ConfigError(f"{key}: {value!r} has the key {name} twice" for name, _, _ in duplicates)
        put(content, key, read)


def _loaded(text: str) -> tuple[Any, list[tuple[str, int, int]]]:
    """Return the content of a YAML text, and each duplicate key with the line numbers of its two occurrences.

    The caller must check for duplicates, because PyYAML silently uses the last value of a duplicate key.

    Raises:
        yaml.YAMLError: The text is not YAML.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, []
        return loader.construct_document(root), sorted(_duplicates(root, set()), key=lambda duplicate: duplicate[2])
    except RecursionError:
        raise ConstructorError(None, None, "lists or sections nested too deeply", loader.get_mark()) from None
    finally:
        loader.dispose()


def _duplicates(node: yaml.Node, seen: set[int]) -> Iterator[tuple[str, int, int]]:
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):  # aliases may form a cycle
        return
    seen.add(id(node))
    lines: dict[tuple[str, str], int] = {}
    for child in node.value:
        if isinstance(node, yaml.MappingNode) and isinstance(child[0], yaml.ScalarNode):
            key, line = (child[0].tag, child[0].value), child[0].start_mark.line + 1
            if key in lines:
                yield child[0].value, lines[key], line
            lines.setdefault(key, line)
        for inner in child if isinstance(child, tuple) else (child,):
            yield from _duplicates(inner, seen)


def put(content: dict[str, Any], key: str, value: Any) -> None:
    """Set one value in `content`, given its dotted `key`, such as ``"trainer.steps"``. Missing sections are added.

    Raises:
        ConfigError: A part of the key before the last has a value that is not a section.
    """
    *parents, last = key.split(".")
    section = content
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        inner = section[parent]
        if isinstance(inner, list):
            raise ConfigError([f"{key}: {parent} is a list; set the whole list, as in {parent}=[...]"])
        if not isinstance(inner, dict):
            raise ConfigError([f"{key}: {parent} is a value and has no keys"])
        section = inner
    section[last] = value


def check(content: Mapping[str, Any], root: type[Root]) -> Root:
    """Validate a mapping against a section class.

    Raises:
        ConfigError: The mapping is invalid. The error has one line per problem, starting with the key.
    """
    try:
        return root.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_line(problem, root, content) for problem in error.errors()) from None


def _line(problem: Any, root: type[BaseModel], content: Mapping[str, Any]) -> str:
    location: tuple[str | int, ...] = problem["loc"]
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        plain = ".".join(str(part) for part in location if not isinstance(part, int))
        if issubclass(root, Section) and plain in root.removed:
            return f"{key}: no longer exists; {root.removed[plain]}"
        known, word = _keys(location[:-1], root, content), str(location[-1])
        other = _OTHER_NAMES.get(word, "")
        if other.partition(".")[0] in root.model_fields:
            return f"{key}: no such key; did you mean {other!r}?"
        return f"{key}: no such key{did_you_mean(word, known)}"
    return f"{key}: {wording.value_problem(problem)}"


def _keys(location: Sequence[str | int], root: type[BaseModel], content: Any) -> list[str]:
    """Return the keys that exist in the section at `location` of `content`."""
    found: Any = root
    for part in location:
        if isinstance(part, int):
            content = content[part]
            (item,) = get_args(found)
            found = _section(item, (), content)
        else:
            content = found.completed(content)[part]
            field = found.model_fields[part]
            found = _section(field.annotation, field.metadata, content)
    return list(found.model_fields) if _is_section(found) else []


def _section(annotation: Any, marks: Sequence[Any], content: object) -> Any:
    """Return the section class that an annotation stands for, given the content; any other type unchanged.

    For a union of a section and a list of sections, this is the member that the content has.
    """
    if get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        members = [_section(one, (), content) for one in get_args(annotation)]
        is_list = isinstance(content, list)
        return next((one for one in members if _is_section(one) is not is_list), annotation)
    choice = next((mark for mark in marks if isinstance(mark, SectionChoice)), None)
    return annotation if choice is None else choice.section_of(content)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
