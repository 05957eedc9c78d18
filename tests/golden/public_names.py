"""Collect every name that users of envkit depend on, from the code itself.

    python tests/golden/public_names.py     # rewrite public_names.json beside this file

The names are those of commands, configuration keys, packages' ``__all__``, environments, entry points, HTTP routes,
WebSocket methods, messages, errors and metrics. What the code keeps in a table is read from that table; what it only
mentions is found in the source (`Source`).
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import tomllib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, cast

import typer

import envkit
from envkit.cli import app
from envkit.config import RunConfig, ServeConfig, kinds
from envkit.environments.catalog import CATALOG
from envkit.errors import EnvkitError
from envkit.http.api.app import create_app
from envkit.http.protocol import messages as wire
from envkit.http.protocol.operations import METHODS
from envkit.protocols import EnvHost, SandboxPool

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".json")

Names: TypeAlias = dict[str, list[str]]
"""A section: entries, each with the names below it; an entry may have none."""

_KINDS = {"CounterMetricFamily": "counter", "GaugeMetricFamily": "gauge", "HistogramMetricFamily": "histogram"}


def collect() -> dict[str, Names]:
    """Return all names by section; the same code gives the same names in the same order."""
    source = Source(ROOT)
    server = _Server()
    sections: dict[str, Names] = {
        "commands": _commands("envkit", typer.main.get_command(app)),
        "training file": _keys(RunConfig.model_json_schema()),
        "serve file": _keys(ServeConfig.model_json_schema()),
        "packages": _packages(),
        "environments": {str(spec["id"]): [] for spec in CATALOG},
        "entry points": {**_scripts(), **source.entry_point_groups(), **_families()},
        "http routes": server.routes(),
        "websocket methods": server.methods(),
        "messages": server.messages(),
        "errors": _errors(),
        "metrics": source.metrics(),
    }
    return {section: dict(sorted(names.items())) for section, names in sections.items()}


def text(collected: Mapping[str, Names]) -> str:
    """Return what the file should hold: a line for each entry."""
    sections = []
    for section, names in collected.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(inner)}" for name, inner in names.items()]
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def differences(old: Mapping[str, Names], new: Mapping[str, Names]) -> list[str]:
    """Return one line for each name that is only in `old` (``-``) or only in `new` (``+``)."""
    before, after = set(_flat(old)), set(_flat(new))
    return [f"{'-' if name in before else '+'} {name}" for name in sorted(before ^ after)]


def _flat(sections: Mapping[str, Names]) -> Iterator[str]:
    for section, names in sections.items():
        for name, inner in names.items():
            yield f"{section}: {name}"
            yield from (f"{section}: {name}: {one}" for one in inner)


def _commands(name: str, command: Any) -> Names:
    """Return the options and arguments of a command and of those below it, by their full names."""
    found = {name: sorted(map(_parameter, command.params))}
    inner = getattr(command, "commands", {})
    if name == "envkit tasks":
        inner = {str(one["id"]): command.get_command(None, str(one["id"])) for one in CATALOG if "commands" in one}
    for word, below in inner.items():
        found |= _commands(f"{name} {word}", below)
    return found


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return " ".join([*parameter.opts, *parameter.secondary_opts])
    return str(parameter.metavar or parameter.name).upper()


def _keys(schema: Mapping[str, Any]) -> Names:
    """Return the keys of a configuration file, each with the words that it takes where those are a fixed list."""
    found: dict[str, set[str]] = {}

    def walk(path: str, part: Mapping[str, Any]) -> None:
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        for key, value in part.get("properties", {}).items():
            walk(f"{path}.{key}" if path else key, value)
        if "properties" not in part and path:
            words = part.get("enum", [part["const"]] if "const" in part else [])
            found.setdefault(path, set()).update(map(str, words))
        for choice in chain(part.get("anyOf", ()), part.get("oneOf", ())):
            walk(path, choice)
        for more, mark in (("items", "[]"), ("additionalProperties", ".*")):
            if isinstance(inner := part.get(more), dict) and "$ref" in inner:
                walk(path + mark, inner)

    walk("", schema)
    return {key: sorted(words) for key, words in found.items()}


def _packages() -> Names:
    """Return ``__all__`` of envkit, of the packages directly below it, and of each environment."""
    names = ["envkit"]
    for parent in (envkit, envkit.environments):
        below = pkgutil.iter_modules(parent.__path__, f"{parent.__name__}.")
        names += [one.name for one in below if one.ispkg and not one.name.rpartition(".")[2].startswith("_")]
    modules = {name: importlib.import_module(name) for name in names}
    return {name: sorted(module.__all__) for name, module in modules.items() if hasattr(module, "__all__")}


def _scripts() -> Names:
    """Return the programs that an installation of envkit brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    return {group: sorted(names) for group, names in groups.items()}


def _families() -> Names:
    """Return the groups in which other packages add parts of a run, each with the built-in kinds."""
    return {family.group: sorted(family.built_in) for family in kinds.FAMILIES.values()}


def _errors() -> Names:
    """Return the errors that cross the wire: code, then classes and status."""
    found: dict[str, list[str]] = {}

    def walk(kind: type[EnvkitError]) -> None:
        if kind.__module__ == EnvkitError.__module__:
            found.setdefault(kind.code, []).append(f"{kind.__name__} {kind.status}{' retry' if kind.retry else ''}")
            for child in kind.__subclasses__():
                walk(child)

    walk(EnvkitError)
    return {code: sorted(kinds) for code, kinds in found.items()}


class _Server:
    """The described API, over a host and a pool that are never called."""

    def __init__(self) -> None:
        self._api = create_app(cast(EnvHost, None), pool=cast(SandboxPool, object())).api()

    def routes(self) -> Names:
        """Return verb and path of each route, with its queries and headers."""
        found: Names = {f"WEBSOCKET {wire.SOCKET_PATH}": []}
        for route in self._api.routes:
            for verb in getattr(route, "methods", None) or ():
                more = (getattr(route, "openapi_extra", None) or {}).get("parameters", ())
                names = [f"{one['in']} {one['name']}" for one in more if one["in"] != "path"]
                found[f"{verb} {getattr(route, 'path', '')}"] = sorted(names)
        return found

    def methods(self) -> Names:
        """Return the methods of frames, with the parameters of each."""
        return {name: sorted(one.request.__struct_encode_fields__) for name, one in METHODS.items()}

    def messages(self) -> Names:
        """Return the fields of each message of the OpenAPI document, and of the frames of a socket."""
        schemas = self._api.openapi()["components"]["schemas"]
        found = {name: sorted(schema.get("properties") or schema.get("enum", ())) for name, schema in schemas.items()}
        return found | {kind.__name__: sorted(kind.__struct_fields__) for kind in (wire.Frame, wire.Answer)}


class Source:
    """The product's source: what it names without keeping a table of it.

    Args:
        root: The checkout.
    """

    def __init__(self, root: Path) -> None:
        folders = ("envkit", "environments", "sandbox", "trainer_bridge")
        paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
        real = {path.resolve(): path for path in paths if "__pycache__" not in path.parts}
        self._modules = [ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in real]

    def metrics(self) -> Names:
        """Return the metrics as Prometheus shows them, with their kind and labels."""
        found: Names = {}
        for call in self._calls_of(*_KINDS):
            name = str(cast(ast.Constant, call.args[0]).value)
            kind = _KINDS[cast(ast.Name, call.func).id]
            labels = [ast.literal_eval(word.value) for word in call.keywords if word.arg == "labels"]
            found[f"{name!s}_total" if kind == "counter" else str(name)] = [kind, *chain.from_iterable(labels)]
        return found

    def entry_point_groups(self) -> Names:
        """Return the groups in which installed packages are looked for, where a call names the group itself."""
        constants = dict(chain.from_iterable(map(_constants, self._modules)))
        groups = [
            word.value for call in self._calls_of("entry_points") for word in call.keywords if word.arg == "group"
        ]
        named = [constants.get(one.id) if isinstance(one, ast.Name) else getattr(one, "value", None) for one in groups]
        return {name: [] for name in named if isinstance(name, str)}

    def _calls_of(self, *names: str) -> Iterator[ast.Call]:
        for module in self._modules:
            for node in ast.walk(module):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                    yield node


def _constants(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names to which a module assigns a text."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value.value


def main() -> None:
    FILE.write_text(text(collect()), encoding="utf-8")


if __name__ == "__main__":
    main()
