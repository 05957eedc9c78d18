"""Generates the pages about the configuration files and the HTTP API. ``--check`` only reports outdated pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import http_reference

from envkit.config import EvalConfig, RunConfig, ServeConfig
from envkit.config.evaluation import TRAINING_KEYS

FOLDER = Path(__file__).parent
HEADS = {
    "config": """\
# The training file

This page lists every key of the file that `envkit train` and `envkit check` read. An unknown key in the file is an
error. To override one key on the command line, use `--set`, for example `--set trainer.steps=10`. Editors that support
JSON schemas can complete and check the file with [config.schema.json](config.schema.json).

Do not edit this page: `make docs` generates it from `envkit/config/`.
""",
    "eval-config": """\
# The evaluation file

This page lists every key of the file that `envkit eval FILE` reads. `envkit eval ENV --policy POLICY` and
[`envkit.evaluate`](own-trainer.md#train-from-python) describe an evaluation with the same keys: options such as
`--episodes` are short names of keys, and `--set` overrides any key, for example `--set rollout.player_timeout_s=60`.
Only `env.id` and `policy` are required:

```yaml
env: {id: FrozenLake-v0, options: {size: 6}}
policy: model:smollm2-135m
evaluation: {episodes: 64, attempts: 4}
rollout: {temperature: 0.7, max_tokens: 4096}
renderer: {thinking: cut}
```

Most sections are those of the [training file](config.md). A key that the policy cannot use is an error, such as
`rollout.max_tokens` for `openai:`, and so is a key that only training uses, such as `evaluation.every`. These defaults
depend on the policy: `env.num_envs` is 16 for language models, and 8 in an environment that uses sandboxes;
`rollout.max_turns` is no limit for players without a language model; `rollout.turn_tokens` is 4096 and
`renderer.thinking` is `cut` for `openai:`; and a `checkpoint:` has the values of its run, `agent` included. Editors
that support JSON schemas can complete and check the file with [eval-config.schema.json](eval-config.schema.json).

Do not edit this page: `make docs` generates it from `envkit/config/`.
""",
    "serve-config": """\
# The server's file

This page lists every key of the file that `envkit serve --config` reads. An unknown key in the file is an error. To
override one key on the command line, use `--set`, for example `--set node.max_sandboxes=100`. Editors that support JSON
schemas can complete and check the file with [serve-config.schema.json](serve-config.schema.json).

Do not edit this page: `make docs` generates it from `envkit/config/`.
""",
}
LIMITS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}

Schema = Mapping[str, Any]


def reference(head: str, schema: Schema) -> str:
    """Return a page: `head`, then a table of keys for each section of the configuration file with this `schema`."""
    return head + "".join(_section("", schema, schema["$defs"]))


def _section(path: str, section: Schema, definitions: Schema, kind: str = "") -> Iterator[str]:
    """Yield the heading of a section with a table of its plain keys, then the same for each section inside it.

    `kind` is its kind if a section at this path may be of several kinds with different keys.
    """
    keys = section["properties"]
    required = section.get("required", [])
    rows = [_row(name, key, name in required) for name, key in keys.items() if any(map(_is_plain, _choices(key)))]
    title = f"`{path}` of kind `{kind}`" if kind else f"`{path}`" if path else "At the top"
    about = section.get("description", "") if path else ""
    yield f"\n## {title}\n" + (f"\n{about}\n" if about else "")
    if rows:
        yield "\n| key | values | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
    for name, key in keys.items():
        within = (f"{path}.{name}" if path else name) + ("[]" if key.get("type") == "array" else "")
        references = dict.fromkeys(choice["$ref"].rpartition("/")[2] for choice in _choices(key) if "$ref" in choice)
        for one in map(definitions.__getitem__, references):
            inner_kind = one["properties"]["kind"]["const"] if len(references) > 1 else ""
            yield from _section(within, one, definitions, inner_kind)


def _choices(key: Schema) -> list[Schema]:
    """Return the schemas of the values that `key` may have, or of those in its list."""
    if "anyOf" in key:
        return [choice for part in key["anyOf"] for choice in _choices(part)]
    return _choices(key["items"]) if "items" in key else [key]


def _is_plain(choice: Schema) -> bool:
    return "$ref" not in choice and choice.get("type") != "null"


def _row(name: str, key: Schema, required: bool) -> str:
    default = "(required)" if required else f"`{json.dumps(key.get('default'))}`"
    if "default" not in key and not required:
        default = "`{}`" if key.get("type") == "object" else ""
    meaning = " ".join(key.get("description", "").split()).replace("|", "\\|")
    return f"| `{name}` | {_values(key)} | {default} | {meaning} |\n"


def _values(key: Schema) -> str:
    if "const" in key:
        return f"`{key['const']}`"
    if "enum" in key:
        return ", ".join(f"`{value}`" for value in key["enum"])
    if "$ref" in key:
        return "section"
    if "anyOf" in key:
        return " or ".join(dict.fromkeys(_values(choice) for choice in key["anyOf"]))
    kind = {"null": "null", "object": "mapping", "array": "list", "string": "text"}.get(key["type"], key["type"])
    limits = [text.format(f"{key[name]:g}") for name, text in LIMITS.items() if name in key]
    if "multipleOf" in key:
        limits.append(f"multiple of {key['multipleOf']}")
    return f"{kind} {', '.join(limits)}".strip()


def _leave_out(schema: Schema, section: str, key: str) -> None:
    """Remove a key of a section from a schema."""
    for choice in _choices(schema["properties"][section]):
        schema["$defs"][choice["$ref"].rpartition("/")[2]]["properties"].pop(key, None)


def main() -> None:
    files = {FOLDER / "http-api.md": http_reference.page()}
    for name, config in (("config", RunConfig), ("eval-config", EvalConfig), ("serve-config", ServeConfig)):
        schema = config.model_json_schema()
        for key in TRAINING_KEYS if config is EvalConfig else ():
            _leave_out(schema, *key.split("."))
        files[FOLDER / f"{name}.md"] = reference(HEADS[name], schema)
        files[FOLDER / f"{name}.schema.json"] = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"not up to date (make docs): {', '.join(path.name for path in stale)}" if stale else 0)
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
        print(f"wrote {path.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main()
