"""Counts modules in folders and imports between them: ``python -m tests.project.arrows``.

An *entry* of a package is a module or package directly in it. An *arrow* leads from one entry to another if any module
of the one imports any module of the other; imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPOKES = ("environments", "sandbox", "trainer_bridge")
MAX_MODULES = 12
MAX_ARROWS = {"envkit.sandbox": 30, "envkit.http": 20}


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the modules of the product by their import names."""
    found = {}
    for top in ("envkit", *SPOKES):
        for path in sorted(root.joinpath(top).rglob("*.py")):
            parts = list(path.relative_to(root).with_suffix("").parts)
            if top == "envkit" and parts[1] in SPOKES:  # a link, which newer versions of Python follow
                continue
            name = ".".join(parts if top == "envkit" else ["envkit", *parts])
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of the product that module `name` imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        yield from (target for target in targets if target in known and target != name)


@cache
def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return what each module imports."""
    known = modules(root)
    return {name: set(imports(name, path, known)) for name, path in known.items()}


def arrows(graph: Mapping[str, set[str]], package: str) -> set[tuple[str, str]]:
    """Return the arrows between the entries of `package`."""

    def entry(name: str) -> str:
        return name.removeprefix(package + ".").partition(".")[0] if name.startswith(package + ".") else ""

    pairs = {(entry(name), entry(target)) for name, targets in graph.items() for target in targets}
    return {(one, other) for one, other in pairs if one and other and one != other}


def cycles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return groups of modules that import each other, directly or by way of others.

    The package itself is left out: it only names what it hands on.
    """
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            waiting += [name for name in graph[waiting.pop()] if name not in seen and name != "envkit"]
            seen.update(waiting)
        reached[start] = seen
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return sorted(group for group in groups if group)


def crowded(root: Path = ROOT, *, above: int = MAX_MODULES) -> dict[str, int]:
    """Return the folders of the repository with more than `above` modules; ``__init__.py`` is not counted."""
    counts: dict[str, int] = {}
    for top in ("envkit", *SPOKES, "tests", "benchmarks", "docs", "examples"):
        for path in root.joinpath(top).rglob("*.py"):
            folder = path.parent.relative_to(root)
            is_link = top == "envkit" and len(folder.parts) > 1 and folder.parts[1] in SPOKES
            if path.name != "__init__.py" and not is_link:
                counts[str(folder)] = counts.get(str(folder), 0) + 1
    return {folder: count for folder, count in sorted(counts.items()) if count > above}


def main() -> None:
    graph = import_graph()
    for package in ("envkit.sandbox", "envkit.http", "envkit.wiring", "envkit.fleet", "envkit.trainer_bridge"):
        found = arrows(graph, package)
        print(f"{package}: {len(found)} arrows")
        for one in sorted({one for one, _ in found}):
            print(f"  {one} -> {', '.join(sorted(other for start, other in found if start == one))}")
    print("cycles:", cycles(graph) or "none")
    print(f"folders with more than {MAX_MODULES} modules:", crowded() or "none")


if __name__ == "__main__":
    main()
