"""Reading and checking of configuration files. Their sections are frozen objects and reject unknown keys.

Files cannot use interpolation, inheritance, class paths or environment variables. Names of keys contain units. All
problems of a file are reported together, one line for each problem, starting with the key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
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

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse duplicate keys, of which PyYAML silently uses the last one. Here, no keys are merged (<<) yet."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: dict[tuple[str, str], int] = {}
        for key in (one for one, _ in node.value if isinstance(one, yaml.ScalarNode)):
            if (first := keys.get((key.tag, key.value))) is not None:
                problem = f"duplicate key {key.value} (first in line {first}); remove one of the two"
                raise ConstructorError(None, None, problem, key.start_mark)
            keys[key.tag, key.value] = key.start_mark.line + 1
        return node


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
        yaml.YAMLError: The text is not YAML, or has a duplicate key.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConstructorError(None, None, "lists or sections nested too deeply", None) from None


def write_yaml(content: Any) -> str:
    """Return `content` as a YAML text that `read_yaml` reads."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class Section(BaseModel):
    """A section of a file. The key of an optional section may have no value in YAML; the section then has defaults."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @classmethod
    def completed(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a section with the values that it leaves to other keys, such as a preset's."""
        return content

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, content: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            if isinstance(content, dict):
                content = cls.completed(content)
                fields = {name: field for name, field in cls.model_fields.items() if not field.is_required()}
                empty = [name for name, one in fields.items() if _holds_sections(one.annotation)]
                content = {key: one for key, one in content.items() if one is not None or key not in empty}
            return handler(content)
        except ValidationError as error:
            found = [_with_known(one, cls.model_fields) for one in error.errors()]
            raise ValidationError.from_exception_data(cls.__name__, found) from None


def _with_known(problem: Any, known: Iterable[str]) -> InitErrorDetails:
    """Return a problem of a section. An unknown key of this section, not of an inner one, gets the `known` keys."""
    of_key = {"known": [*known]} if problem["type"] == "extra_forbidden" and "ctx" not in problem else {}
    context = {**problem.get("ctx", {}), **of_key, "message": problem["msg"]}
    error = PydanticCustomError(problem["type"], "{message}", context)
    return InitErrorDetails(type=error, loc=problem["loc"], input=problem["input"])


def _holds_sections(annotation: Any) -> bool:
    """Return whether the value of a key is a section or a list of sections."""
    inner = [get_args(one)[0] if get_origin(one) is Annotated else one for one in get_args(annotation) or (annotation,)]
    return all(isinstance(one, type) and issubclass(one, Section) for one in inner)


Root = TypeVar("Root", bound=Section)


def content_of(path: Path, *, example: str) -> dict[str, Any]:
    """Return the content of a YAML file. The error about an empty file quotes `example`."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {wording.yaml_problem(error)}"]) from None
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
            read = read_yaml(value)
        except yaml.YAMLError as error:
            raise ConfigError([f"{key}: {value!r} is not YAML: {getattr(error, 'problem', error)}"]) from None
        put(content, key, read)


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
        raise ConfigError(_line(problem, root) for problem in error.errors()) from None


def _line(problem: Any, root: type[Section]) -> str:
    location: tuple[str | int, ...] = problem["loc"]
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        word = str(location[-1])
        other = _OTHER_NAMES.get(word, "")
        if other.partition(".")[0] in root.model_fields:
            return f"{key}: no such key; did you mean {other!r}?"
        return f"{key}: no such key{did_you_mean(word, problem['ctx']['known'])}"
    return f"{key}: {wording.value_problem(problem)}"
