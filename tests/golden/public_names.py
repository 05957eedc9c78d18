"""Collect every name that users of envkit depend on, from the code itself.

    python tests/golden/public_names.py     # rewrite public_names.json beside this file

The names are those of commands, configuration keys, packages' ``__all__``, environments, entry points, HTTP routes and
WebSocket methods, read from the tables in which the code keeps them.
"""

from __future__ import annotations

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
from envkit.http.api.app import create_app
from envkit.http.protocol import messages as wire
from envkit.http.protocol.operations import METHODS
from envkit.protocols import EnvHost, SandboxPool

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".json")

Names: TypeAlias = dict[str, list[str]]
"""A section: entries, each with the names below it; an entry may have none."""


def collect() -> dict[str, Names]:
    """Return all names by section; the same code gives the same names in the same order."""
    api = create_app(cast(EnvHost, None), pool=cast(SandboxPool, object())).api()  # over a host that is never called
    sections: dict[str, Names] = {
        "commands": _commands("envkit", typer.main.get_command(app)),
        "training file": _keys(RunConfig.model_json_schema()),
        "serve file": _keys(ServeConfig.model_json_schema()),
        "packages": _packages(),
        "environments": {"ids": sorted(str(spec["id"]) for spec in CATALOG)},
        "entry points": {**_scripts(), **_families()},
        "routes": {**_routes(api), f"WEBSOCKET {wire.SOCKET_PATH}": sorted(METHODS)},
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
    """Return the sections of a configuration file, each with its keys."""
    found: dict[str, set[str]] = {}

    def walk(path: str, part: Mapping[str, Any]) -> None:
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        for key, value in part.get("properties", {}).items():
            found.setdefault(path, set()).add(key)
            walk(f"{path}.{key}" if path else key, value)
        for choice in chain(part.get("anyOf", ()), part.get("oneOf", ())):
            walk(path, choice)
        for more, mark in (("items", "[]"), ("additionalProperties", ".*")):
            if isinstance(inner := part.get(more), dict) and "$ref" in inner:
                walk(path + mark, inner)

    walk("", schema)
    return {section: sorted(keys) for section, keys in found.items()}


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
    return {f"envkit.{name}": sorted(family.built_in) for name, family in kinds.FAMILIES.items()}


def _routes(api: Any) -> Names:
    """Return the paths of each verb."""
    found: dict[str, set[str]] = {}
    for route in api.routes:
        for verb in getattr(route, "methods", None) or ():
            found.setdefault(verb, set()).add(getattr(route, "path", ""))
    return {verb: sorted(paths) for verb, paths in found.items()}


def main() -> None:
    FILE.write_text(text(collect()), encoding="utf-8")


if __name__ == "__main__":
    main()
