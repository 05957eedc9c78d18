"""The registry of environments: ids, entry points and options. An environment is imported when it is first used."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any

from envkit.errors import ConfigError, UnknownEnvError, did_you_mean
from envkit.installation import entry_points
from envkit.types import Options

ENTRY_POINT_GROUP = "envkit.envs"
"""Entry point group in which other packages announce their environments.

Each entry point is a function that registers the environments of its package. envkit calls it once, without arguments.
"""
PLAYERS_GROUP = "envkit.players"
"""Entry point group in which other packages add players to environments that have some, such as cheats.

The name of an entry point is the id of the environment, and its value a mapping as `EnvSpec.players`.
"""


NEEDS = ("sandbox", "judge")
"""The possible values of `EnvSpec.needs`."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """A registered environment.

    Attributes:
        id: Name of the environment with a version at its end, such as ``"Sokoban-v0"``.
        entry_point: ``"module:Class"`` or a callable. Called with the options as keyword arguments, it returns a
            ``gymnasium.Env`` with text observations and actions, or an `envkit.env.AsyncEnv`.
        options: Options that the entry point gets if the caller does not override them.
        expert: ``"module:Class"`` of an `envkit.protocols.Expert`, or a callable, or None. It is called with the same
            options and data as the entry point, because options may change the observations that the expert reads.
        summary: One-line description, for lists.
        splits: Values of the environment's option ``split``, which chooses training levels or evaluation levels. If
            empty, training and evaluation levels differ only in their seeds.
        compact_options: Options that give the shortest observations, for policies trained from scratch.
        replayable: Whether task and actions alone determine the observations. envkit then restores a lost episode by
            repeating its actions.
        vector_entry_point: ``"module:Class"`` or a callable, or None. Called with ``num_envs``, ``autoreset`` and the
            options, it returns a ``gymnasium.vector.VectorEnv`` equivalent to ``num_envs`` single environments.
        needs: What the entry point gets in addition to the options: ``"sandbox"`` passes an
            `envkit.protocols.SandboxPool` as the argument `sandboxes`, ``"judge"`` an `envkit.protocols.Judge` as
            `judge`. Such an environment must be an `envkit.env.AsyncEnv`. It runs in a trusted process, not in a
            sandbox.
        players: Players of the environment by name, such as ``oracle``, ``nop`` and ``cheat:NAME``, each as
            ``"module:Class"`` or a callable. Called with the options and data, it returns an
            `envkit.protocols.Player`. Other packages may add players; see `PLAYERS_GROUP`.
        commands: Commands of ``envkit tasks`` for this environment by name, such as ``build``, each as
            ``"module:function"`` or a callable that returns an `envkit.types.CommandResult`, and may be async. Its
            signature and docstring are its command line, with typer's ``Argument`` and ``Option`` in annotations. It
            gets the arguments of `envkit.wiring.commands.RESERVED` from envkit, not from the command line.
        operator_options: Options that choose files, folders, images, networks or variables of a machine, in addition
            to those of `OPERATOR_OPTIONS`, which count in every environment. Only the user who starts a program sets
            them: clients of a server, recordings and policy folders cannot.
        task_set: ``"module:Class"`` or a callable, or None. Called with the options, it returns an
            `envkit.protocols.TaskSet`. None means that every seed is a task.
        data: Data of the environment by name, each with its builder as ``"module:function"`` or a callable. ``envkit
            data NAME`` calls the builder with an empty folder to fill and with a function that shows a line. A builder
            whose third argument is `source` also gets the path of ``--from PATH``, and builds from the user's files.
            The entry point gets the folders, which are read-only in sandboxes, as the argument `data`, by name. Only
            the data that it looks up must exist. Outside sandboxes, looking up missing data builds it, unless its
            builder needs a source.
        vocabulary: ``"module:function"`` or a callable, or None. Called with the options and data, it returns texts
            with all words of the environment, for the tokenizer of a policy that is trained from scratch. None means
            that the tokenizer only knows the words of some episodes with random moves, and the others are unknown.
            A text that is a number, such as ``13``, becomes a single token, as moves do.
        success_return: Return from which an episode counts as a success, for an environment that reports neither the
            metric ``success`` nor a grade; None: success is unknown. Gymnasium's ``reward_threshold`` is not used by
            itself, because it is meant for the mean of many episodes.
    """

    id: str
    entry_point: str | Callable[..., Any]
    options: Options = field(default_factory=dict)
    expert: str | Callable[..., Any] | None = None
    summary: str = ""
    splits: tuple[str, ...] = ()
    compact_options: Options = field(default_factory=dict)
    replayable: bool = True
    vector_entry_point: str | Callable[..., Any] | None = None
    needs: frozenset[str] = frozenset()
    players: Mapping[str, str | Callable[..., Any]] = field(default_factory=dict)
    commands: Mapping[str, str | Callable[..., Any]] = field(default_factory=dict)
    operator_options: frozenset[str] = frozenset()
    task_set: str | Callable[..., Any] | None = None
    data: Mapping[str, str | Callable[..., Any]] = field(default_factory=dict)
    vocabulary: str | Callable[..., Any] | None = None
    success_return: float | None = None


OPERATOR_OPTIONS = frozenset({"file", "image", "network", "tasks"})
"""Options that only the user sets, in every environment; see `EnvSpec.operator_options`."""

_NO_OPTIONS = frozenset({"data", "judge", "render_mode", "sandboxes"})
"""Parameters of an entry point that are not options of an environment."""

_SPECS: dict[str, EnvSpec] = {}
_WITH_PLAYERS: dict[str, EnvSpec] = {}
"""Specs with the players of other packages, by id."""
_LOADED: set[str] = set()
_LOADING: set[str] = set()
_LOCK = threading.RLock()
"""Held while entry points are loaded. `register` does not acquire it: modules may call `register` during an import."""


def register(id: str, entry_point: str | Callable[..., Any], **fields: Any) -> EnvSpec:
    """Register an environment; `fields` are those of `EnvSpec`. Repeating a call with equal arguments has no effect.

    Raises:
        ConfigError: The id has no version, or belongs to a different environment; there is no such field; `needs`
            contains another name; or another environment declares data of the same name with a different builder.
    """
    name, dash, version = id.rpartition("-v")
    if not (dash and name and version.isdecimal()):
        raise ConfigError([f"id: {id!r} must end in a version, such as {id.rstrip('-') or 'Name'}-v0"])
    for field_name in fields:
        if field_name not in EnvSpec.__dataclass_fields__:
            raise ConfigError([f"{field_name}: no such field{did_you_mean(field_name, EnvSpec.__dataclass_fields__)}"])
    given = {name: value for name, value in fields.items() if value is not None}
    spec = EnvSpec(
        id, entry_point, **{name: _COPIES[name](one) if name in _COPIES else one for name, one in given.items()}
    )
    for need in spec.needs:
        if need not in NEEDS:
            raise ConfigError([f"needs: {need!r} is not one of {', '.join(NEEDS)}"])
    for other in list(_SPECS.values()):
        for name in spec.data.keys() & other.data.keys() if other.id != id else ():
            if spec.data[name] != other.data[name]:
                problem = f"{id} and {other.id} declare data {name!r} with different builders; rename one of them"
                raise ConfigError([f"data: {problem}"])
    old = _SPECS.setdefault(id, spec)
    if old != spec:
        raise ConfigError([f"id: {id!r} is already registered for {old.entry_point}; choose another id"])
    return spec


_COPIES: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("options", "compact_options", "players", "commands", "data"), dict),
    "splits": tuple,
    "needs": frozenset,
    "operator_options": frozenset,
}


def is_registered(env_id: str) -> bool:
    """Return whether an environment with this id is registered already, without loading entry points."""
    return env_id in _SPECS


def find(env_id: str) -> EnvSpec:
    """Return the spec of `env_id`.

    Raises:
        UnknownEnvError: No environment has this id. The message suggests the closest id.
    """
    # Only an unknown id needs the entry points of other packages, and finding them takes milliseconds.
    if not is_registered(env_id):
        load_entry_points()
    try:
        spec = _SPECS[env_id]
    except KeyError:
        raise UnknownEnvError(env_id, list(_SPECS)) from None
    if not spec.players:
        return spec
    if env_id not in _WITH_PLAYERS:
        _WITH_PLAYERS[env_id] = replace(spec, players={**spec.players, **_added_players(env_id)})
    return _WITH_PLAYERS[env_id]


def _added_players(env_id: str) -> Mapping[str, Any]:
    """Return the players that other packages add to an environment. If an entry point fails, issue a warning."""
    found: dict[str, Any] = {}
    for point in entry_points(PLAYERS_GROUP).select(name=env_id):
        try:
            found.update(point.load())
        except Exception as error:  # a broken package must not prevent episodes
            warnings.warn(f"players of {point.value!r} are left out: {error!r}", stacklevel=3)
    return found


def specs() -> Iterator[EnvSpec]:
    """Return the specs of all registered environments, sorted by id."""
    load_entry_points()
    return iter(sorted(_SPECS.values(), key=lambda spec: spec.id))


def load_entry_points() -> None:
    """Call the entry points of installed packages, so that they register environments. If one fails, issue a warning.

    A package that is still being imported, or whose own entry point makes this call, is skipped until the next call.
    """
    with _LOCK:
        for point in entry_points(ENTRY_POINT_GROUP):
            if point.value in _LOADED | _LOADING or _is_half_imported(point):
                continue
            _LOADING.add(point.value)
            try:
                point.load()()
            except Exception as error:  # a broken package must not prevent the others from loading
                warnings.warn(f"environments of {point.value!r} are left out: {error!r}", stacklevel=2)
            finally:
                _LOADING.discard(point.value)
            _LOADED.add(point.value)


def _is_half_imported(point: EntryPoint) -> bool:
    """Return whether the entry point's module, or a package that contains it, is still being imported."""
    parts = point.module.split(".")
    modules = (sys.modules.get(".".join(parts[:count])) for count in range(1, len(parts) + 1))
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


def load(entry_point: str | Callable[..., Any]) -> Any:
    """Import and return what ``"module:name"`` or ``"module:Class.method"`` names; return a callable unchanged."""
    if not isinstance(entry_point, str):
        return entry_point
    module, _, name = entry_point.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def foreign_choices(spec: EnvSpec, options: Options) -> list[str]:
    """Return the names of `options`, chosen by others than this user, that only the user may set."""
    names = (spec.operator_options | OPERATOR_OPTIONS) & options.keys()
    return sorted(name for name in names if options[name] != spec.options.get(name))


def defaults(spec: EnvSpec, options: Options) -> Mapping[str, Any]:
    """Return the options of `spec`, overridden and extended by the caller's `options`."""
    return {**spec.options, **options}


def option_defaults(spec: EnvSpec) -> Mapping[str, Any]:
    """Return the options that an environment declares, with their defaults.

    They are the optional parameters of its entry point, and the class attribute ``options``, a mapping of names to
    defaults, or what a class method `option_defaults` returns.
    """
    entry_point = load(spec.entry_point)
    parameters = inspect.signature(entry_point).parameters.values()
    own = {one.name: one.default for one in parameters if one.default is not one.empty and one.name not in _NO_OPTIONS}
    method = getattr(entry_point, "option_defaults", None)
    return {**own, **(getattr(entry_point, "options", {}) if method is None else method()), **spec.options}
