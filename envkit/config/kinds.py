"""Kinds of engines, trainers and other parts of a run: those of envkit, and those that installed packages provide.

Each family of parts has an entry point group, such as ``envkit.engines``. The value of an entry point is an object with
the attributes of `Kind`; its name is the value of the key ``kind``. Built-in kinds are imported when they are first
used. An agent is a function, which a program may also add itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, Protocol

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from envkit.config.grammar import Section
from envkit.errors import UsageError, did_you_mean
from envkit.installation import entry_points


class Kind(Protocol):
    """One kind of a family, such as the engine ``transformers``.

    Attributes:
        section: Class of its section in the training file. It extends the family's class in `envkit.config.parts`, and
            its key ``kind`` has the type ``Literal["NAME"]`` and the default ``"NAME"``.
        open: Creates the part from a context of `envkit.wiring.contexts`; `docs/extend.md` lists the families.
    """

    @property
    def section(self) -> type[Section]: ...
    @property
    def open(self) -> Callable[[Any], Any]: ...


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A kind of envkit: the places of its section class and of its function `open`, as ``"module:name"``."""

    section_place: str
    open_place: str

    @property
    def section(self) -> type[Section]:
        found: type[Section] = resolve_name(self.section_place)
        return found

    def open(self, context: Any) -> Any:
        return resolve_name(self.open_place)(context)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of parts.

    Attributes:
        noun: What one of its parts is called.
        built_in: The kinds of envkit; for a part of an algorithm, the module that has it as `PART`.
        added: The parts that this process has added, which take precedence over those of packages.
    """

    noun: str
    built_in: Mapping[str, Kind | str] = field(default_factory=dict)
    added: dict[str, Any] = field(default_factory=dict)


_PARTS = "envkit.config.parts"
_WIRING = "envkit.wiring.training"
_ALGORITHMS = "envkit.trainer_bridge.algorithms"


def _algorithm_parts(noun: str, folder: str, *names: str) -> Family:
    return Family(noun, {name: f"{_ALGORITHMS}.{folder}.{name}" for name in names})


_SANDBOX = BuiltIn(f"{_PARTS}:BuiltInSandboxSection", "envkit.wiring.sandboxes.env_sandboxes:open_backend")
FAMILIES: Mapping[str, Family] = {
    "engines": Family(
        "engine",
        {
            "transformers": BuiltIn(f"{_PARTS}:TransformersEngineSection", f"{_WIRING}.torch_parts:open_transformers"),
            "vllm": BuiltIn(f"{_PARTS}:VllmEngineSection", f"{_WIRING}.kinds.vllm:open_vllm"),
        },
    ),
    "trainers": Family(
        "trainer",
        {"torch_local": BuiltIn(f"{_PARTS}:TorchTrainerSection", f"{_WIRING}.torch_parts:open_torch_local")},
    ),
    "renderers": Family(
        "renderer",
        {"auto": BuiltIn(f"{_PARTS}:AutoRendererSection", f"{_WIRING}.torch_parts:open_renderer")},
    ),
    "sandboxes": Family(
        "sandbox backend",
        dict.fromkeys(("auto", "local", "docker", "process", "none"), _SANDBOX),
    ),
    "trackers": Family(
        "tracker",
        {
            "tensorboard": BuiltIn(f"{_PARTS}:TensorBoardSection", f"{_WIRING}.kinds.built_in:open_tensorboard"),
            "wandb": BuiltIn(f"{_PARTS}:WandbSection", f"{_WIRING}.kinds.built_in:open_wandb"),
        },
    ),
    "policies": Family("player"),
    "agents": Family("agent"),
    "filters": Family(
        "filter",
        {
            name: BuiltIn(f"{_PARTS}:{section}Section", f"{_WIRING}.kinds.built_in:open_{name}")
            for name, section in (
                ("zero_variance", "ZeroVariance"),
                ("success_band", "SuccessBand"),
                ("top_variance", "TopVariance"),
            )
        },
    ),
    "advantages": _algorithm_parts(
        "advantage",
        "advantages",
        *("group_normalised", "batch_normalised", "gae", "reinforce_plus_plus", "gigpo", "chunk_returns"),
        *("pass_at_k", "several_rewards", "distillation", "asyppo"),
    ),
    "losses": _algorithm_parts(
        "loss",
        "losses",
        *("clipped", "reinforce", "imitation", "cispo", "topr", "kimi", "sapo", "dppo", "chunk_clipped"),
        *("clip_cov", "kl_cov", "top_entropy"),
    ),
    "aggregations": _algorithm_parts(
        "aggregation", "aggregations", "token_mean", "rollout_mean", "prompt_mean", "constant"
    ),
    "corrections": _algorithm_parts("correction", "corrections", "tis", "mis", "icepop", "sequence_mask"),
}
"""The families. The built-in players are in `envkit.wiring.evaluation.policies`."""


def names(family: str) -> list[str]:
    """Return the names of all kinds of a family, the built-in ones first."""
    row = FAMILIES[family]
    return list(dict.fromkeys([*row.built_in, *sorted(row.added), *sorted(entry_points(f"envkit.{family}").names)]))


def find(family: str, name: str) -> Any:
    """Return a kind of a family: a `Kind`, a `Part` of an algorithm, or an agent. A built-in kind takes precedence.

    Raises:
        UsageError: There is no such kind, or its package cannot be imported.
    """
    row = FAMILIES[family]
    if (built_in := row.built_in.get(name)) is not None:
        return import_module(built_in).PART if isinstance(built_in, str) else built_in
    if name in row.added:
        return row.added[name]
    for point in entry_points(f"envkit.{family}").select(name=name):
        try:
            return point.load()
        except Exception as error:  # an import may raise anything
            package = point.dist.name if point.dist is not None else point.module
            problem = f"the {row.noun} {name!r} of the package {package} cannot be imported"
            reason = f"{type(error).__name__}: {error}; repair or uninstall the package"
            raise UsageError(f"{problem}: {reason}") from error
    raise UsageError(f"no {row.noun} is called {name!r}{did_you_mean(name, names(family))}")


@dataclass(frozen=True, slots=True)
class ByKind:
    """Annotation of a key whose section has the class of the kind that its key ``kind`` names.

    Attributes:
        family: The family.
        default: The kind of a section without the key ``kind``; None if the key is required.
        may_be_name: Whether the name of a kind may stand for a section with defaults.
    """

    family: str
    default: str | None = None
    may_be_name: bool = False

    def section_of(self, content: object) -> type[Section] | None:
        """Return the class of a section with this content; None if the content names no kind.

        Raises:
            UsageError: There is no such kind, or its package cannot be imported.
        """
        content = self._whole(content)
        name = content.get("kind", self.default) if isinstance(content, dict) else None
        found: type[Section] | None = find(self.family, name).section if isinstance(name, str) else None
        return found

    def _whole(self, content: object) -> object:
        return {"kind": content} if self.may_be_name and isinstance(content, str) else content

    def _read(self, base: type[Section], content: object) -> object:
        if isinstance(content, base):
            return content
        try:
            section = self.section_of(content)
        except UsageError as error:
            raise invalid("kind", error.detail) from None
        if section is None:
            return base.model_validate(content)  # raises an error about the content or its key `kind`
        if not issubclass(section, base):
            raise invalid("kind", f"the section class {section.__name__} must extend {base.__module__}.{base.__name__}")
        return section.model_validate(self._whole(content))

    def __get_pydantic_core_schema__(
        self, base: type[Section], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda content: self._read(base, content))

    def __get_pydantic_json_schema__(self, _: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # Not before: a part of an algorithm imports this package, so that a model cannot contain its section.
        sections = dict.fromkeys(find(self.family, name).section for name in FAMILIES[self.family].built_in)
        choices: list[Any] = [core_schema.str_schema()] if self.may_be_name else []
        choices += [section.__pydantic_core_schema__ for section in sections]
        return handler(core_schema.union_schema(choices))


def invalid(key: str, message: str) -> ValidationError:
    """Return an error about a key of a section. pydantic adds the location of the section."""
    error = PydanticCustomError(key, "{message}", {"message": message})
    return ValidationError.from_exception_data(key, [InitErrorDetails(type=error, loc=(key,), input=None)])
