"""Configuration: read, edit, merge, validate and repair configuration files (INI, JSON, key = value, TOML)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .family import Draw, DrawnTask, Family, file_case, lines, python, run_case, under, write_file

_KEYS = ("port", "workers", "timeout", "retries", "limit", "cache", "threads", "backlog", "delay", "depth")
_FLAGS = ("debug", "verbose", "secure", "compress", "strict")
Sections = dict[str, dict[str, str]]


def _settings(draw: Draw, count: int) -> dict[str, str]:
    """Return settings whose values are numbers, words and booleans."""
    found = {key: str(draw.number(1, 9000)) for key in draw.some(_KEYS, count)}
    found[draw.one(_FLAGS)] = draw.either("true", "false")
    found["host"] = f"{draw.word()}.example.com"
    return {key: found[key] for key in draw.some(sorted(found), len(found))}


def _sections(draw: Draw, count: int) -> Sections:
    return {name: _settings(draw, draw.number(2, 5)) for name in draw.words(count)}


def _ini(sections: Mapping[str, Mapping[str, str]], *, comments: Mapping[str, str] | None = None) -> str:
    """Return INI text; `comments` are lines before a section."""
    parts = []
    for name, settings in sections.items():
        comment = (comments or {}).get(name, "")
        parts.append(f"{comment}[{name}]\n{_plain(settings)}")
    return "\n".join(parts)


def _plain(settings: Mapping[str, str]) -> str:
    return lines(f"{key} = {value}" for key, value in settings.items())


def _set_value(draw: Draw) -> DrawnTask:
    path, settings = f"{draw.word()}.conf", _settings(draw, draw.number(3, 7))
    key = draw.one([key for key in settings if key in _KEYS])
    value = draw.number(9001, 99999)
    return DrawnTask(
        instruction=draw.either(
            f"Set {key} to {value} in {path}. Change nothing else.",
            f"Change the value of {key} in {path} to {value}, and nothing else.",
        ),
        files={path: _plain(settings)},
        solution=f"sed -i 's/^{key} = .*/{key} = {value}/' {path}\n",
        checks=file_case(path, _plain({**settings, key: str(value)})),
    )


def _get_value(draw: Draw) -> DrawnTask:
    path, out, settings = f"{draw.word()}.conf", draw.output(), _settings(draw, draw.number(3, 7))
    key = draw.one([key for key in settings if key not in _FLAGS])
    return DrawnTask(
        instruction=draw.either(
            f"Write the value of {key} in {path} to {out}.",
            f"Which value does {key} have in {path}? Write only the value to {out}.",
        ),
        files={path: _plain(settings)},
        solution=f"sed -n 's/^{key} = //p' {path} > {out}\n",
        checks=file_case(out, settings[key], "words"),
    )


def _append(draw: Draw) -> DrawnTask:
    path, settings, key = f"{draw.word()}.conf", _settings(draw, draw.number(2, 5)), f"{draw.word()}_{draw.one(_KEYS)}"
    value = draw.number(1, 9999)
    return DrawnTask(
        instruction=f"Add the line `{key} = {value}` at the end of {path}.",
        files={path: _plain(settings)},
        solution=f"echo '{key} = {value}' >> {path}\n",
        checks=file_case(path, _plain({**settings, key: str(value)})),
    )


def _set_in_section(draw: Draw) -> DrawnTask:
    path, sections = f"{draw.word()}.ini", _sections(draw, draw.number(3, 5))
    name, key = draw.one(list(sections)), draw.one(_KEYS)
    for settings in sections.values():
        settings[key] = str(draw.number(1, 9000))
    value = str(draw.number(9001, 99999))
    comments = {other: f"# {draw.sentence()}\n" for other in sections if draw.chance(0.5)}
    after = {other: {**settings, key: value} if other == name else settings for other, settings in sections.items()}
    return DrawnTask(
        instruction=f"In {path}, set {key} to {value} in the section {name}. Change nothing else; comments stay.",
        files={path: _ini(sections, comments=comments)},
        solution=f"sed -i '/^\\[{name}\\]/,/^$/s/^{key} = .*/{key} = {value}/' {path}\n",
        checks=file_case(path, _ini(after, comments=comments)),
    )


def _comment(draw: Draw) -> DrawnTask:
    path, settings = f"{draw.word()}.conf", _settings(draw, draw.number(4, 8))
    keys = draw.some(list(settings), 3)
    enables = draw.chance(0.5)
    off = {key: f"# {key}" for key in keys}
    with_comments = _plain({off.get(key, key): value for key, value in settings.items()})
    before, after = (with_comments, _plain(settings)) if enables else (_plain(settings), with_comments)
    command = "s/^# \\({0} = \\)/\\1/" if enables else "s/^{0} = /# &/"
    return DrawnTask(
        instruction=f"In {path}, {'enable' if enables else 'disable'} the settings {keys[0]}, {keys[1]} and {keys[2]}: "
        + (
            'remove the "# " at the beginning of their lines.'
            if enables
            else 'put "# " at the beginning of their lines.'
        )
        + " Change nothing else.",
        files={path: before},
        solution="".join(f"sed -i '{command.format(key)}' {path}\n" for key in keys),
        checks=file_case(path, after),
    )


def _set_json(draw: Draw) -> DrawnTask:
    path, sections = f"{draw.word()}.json", _sections(draw, draw.number(3, 5))
    data: dict[str, dict[str, object]] = {
        name: {key: int(value) if value.isdigit() else value for key, value in settings.items()}
        for name, settings in sections.items()
    }
    name, other = draw.some(list(data), 2)
    key, value = f"{draw.word()}_{draw.one(_KEYS)}", draw.number(1, 99999)
    lost = draw.one(list(data[other]))
    before = json.dumps(data, indent=2)
    data[name][key] = value
    del data[other][lost]
    return DrawnTask(
        instruction=f"In {path}, add {key} with the number {value} to the object {name}, and delete {lost} from the "
        f"object {other}. Everything else stays; the file stays valid JSON.",
        files={path: before + "\n"},
        solution=python(f"""
import json
data = json.load(open("{path}"))
data["{name}"]["{key}"] = {value}
del data["{other}"]["{lost}"]
json.dump(data, open("{path}", "w"), indent=2)
"""),
        checks=file_case(path, json.dumps(data), "json"),
    )


def _override(draw: Draw) -> DrawnTask:
    first, second = (f"{word}.conf" for word in draw.words(2))
    out, base = f"{draw.word()}-{draw.word()}.conf", _settings(draw, 7)
    more = {key: str(draw.number(9001, 99999)) for key in draw.some([*base, *draw.words(3)], 5)}
    merged = {**base, **more}
    text = list(_plain(base).splitlines())
    for _ in range(3):
        text.insert(
            draw.number(0, len(text)),
            draw.either("", f"# {draw.sentence()}", f"# {draw.one(_KEYS)} = {draw.number(1, 99)}"),
        )
    return DrawnTask(
        instruction=f"Merge {first} and {second} into {out}: it has each setting once, as a line KEY = VALUE, sorted "
        f"by key. If a key is in both files, the value of {second} counts. Leave out comments (lines starting with #) "
        "and empty lines.",
        files={first: lines(text), second: _plain(more)},
        solution=f"cat {first} {second} | awk -F' = ' '/^[^#]/ {{ value[$1] = $2 }} END {{ for (key in value) print "
        f'key " = " value[key] }}\' | LC_ALL=C sort > {out}\n',
        checks=file_case(out, _plain({key: merged[key] for key in sorted(merged)})),
    )


def _to_json(draw: Draw) -> DrawnTask:
    path, out, sections = f"{draw.word()}.ini", f"{draw.word()}.json", _sections(draw, draw.number(3, 5))
    comments = {name: f"; {draw.sentence()}\n" for name in sections}

    def typed(value: str) -> object:
        return int(value) if value.isdigit() else value == "true" if value in ("true", "false") else value

    data = {name: {key: typed(value) for key, value in settings.items()} for name, settings in sections.items()}
    return DrawnTask(
        instruction=f"Convert {path} to JSON in {out}: an object with a key for each section, whose value is an object "
        "with the settings. Numbers become JSON numbers, true and false become JSON booleans, all other values become "
        "strings.",
        files={path: _ini(sections, comments=comments)},
        solution=python(f"""
import configparser, json
parser = configparser.ConfigParser()
parser.read("{path}")
def typed(value):
    return int(value) if value.isdigit() else value == "true" if value in ("true", "false") else value
data = {{name: {{key: typed(value) for key, value in parser[name].items()}} for name in parser.sections()}}
json.dump(data, open("{out}", "w"))
"""),
        checks=file_case(out, json.dumps(data), "json"),
    )


def _repair_json(draw: Draw) -> DrawnTask:
    path, sections = f"{draw.word()}.json", _sections(draw, 4)
    text = json.dumps(sections, indent=2).splitlines()
    inner = [number for number, line in enumerate(text) if line.startswith("    ")]
    with_comma = [number for number in inner if text[number].endswith(",")]
    text[draw.one(inner)] += f"  // {draw.sentence(1, 3)}"
    first, second = draw.some(with_comma, 2)
    text[first] = text[first].replace(",", "", 1)
    text[second] = text[second].replace('"', "'")
    last = max(number for number, line in enumerate(text) if line == "  }")
    text[last] = "  },"
    return DrawnTask(
        instruction=f"{path} should be JSON, but it has several syntax errors: comments, a missing comma, wrong quotes "
        "and a comma too many. Repair it in place. All keys and values stay as they are; comments are removed.",
        files={path: lines(text)},
        solution=f"cat > {path} <<'CONTENT'\n{json.dumps(sections, indent=2)}\nCONTENT\n",
        checks=file_case(path, json.dumps(sections), "json"),
    )


def _template(draw: Draw) -> DrawnTask:
    script, (left, right) = draw.script("py"), draw.either(("{{", "}}"), ("@", "@"), ("%(", ")"), ("<", ">"))

    def example() -> tuple[str, dict[str, str], list[str]]:
        names = [word.upper() for word in draw.words(8)]
        values = {
            name: str(draw.either(draw.word(), draw.number(1, 9999), f"/{draw.word()}/{draw.word()}"))
            for name in names[:6]
        }
        text, used = list[str](), set[str]()
        for _ in range(draw.number(8, 14)):
            chosen = draw.some(names, draw.number(1, 2))
            text.append(f"{draw.word()}_{draw.one(_KEYS)} = " + ":".join(f"{left}{name}{right}" for name in chosen))
            used.update(chosen)
        missing = used - values.keys()
        return lines(text), values, sorted(missing)

    visible, (text, values, missing) = example(), example()
    whole = {**values, **{name: str(draw.number(1, 999)) for name in missing}}
    complete = text
    for name, value in whole.items():
        complete = complete.replace(f"{left}{name}{right}", value)
    program = f"""
import re, sys
values = dict(line.rstrip("\\n").split("=", 1) for line in open(sys.argv[2]))
text = open(sys.argv[1]).read()
pattern = re.escape({left!r}) + "([A-Z]+)" + re.escape({right!r})
missing = sorted(set(re.findall(pattern, text)) - values.keys())
if missing:
    print(*missing, sep="\\n")
    sys.exit(3)
print(re.sub(pattern, lambda match: values[match[1]], text), end="")
"""

    def files(now: Mapping[str, str]) -> dict[str, str]:
        return {"t": text, "v": lines(f"{key}={value}" for key, value in now.items())}

    run = f"python3 {script} t v"
    refused = run_case(run, files=files(values), stdout=lines(missing), exit=3) if missing else []
    return DrawnTask(
        instruction=f"Write a Python program {script}, run as `python3 {script} TEMPLATE VALUES`, as in `python3 "
        f"{script} app.template app.values`, which prints a configuration. In the template, each {left}NAME{right} "
        "(NAME has only upper-case letters) is replaced by the value of NAME. A line of VALUES is NAME=VALUE. If the "
        "values lack names of the template, it instead prints only the missing names, one a line, sorted, and ends "
        "with the exit status 3. It is run on other files too.",
        files={"app.template": visible[0], "app.values": lines(f"{key}={value}" for key, value in visible[1].items())},
        solution=write_file(script, program),
        checks=[*refused, *run_case(run, files=files(whole), stdout=complete)],
    )


def _validate(draw: Draw) -> DrawnTask:
    script = draw.script("py")
    missing, unknown, invalid = draw.either(
        ("missing", "unknown", "invalid"), ("absent", "extra", "wrong"), ("M", "U", "I")
    )

    def example() -> tuple[dict[str, tuple[int, int]], dict[str, str], list[str]]:
        rules = {}
        for key in draw.some(_KEYS, 6):
            low = draw.number(0, 50)
            rules[key] = (low, low + draw.number(1, 100))
        settings, found = {}, list[str]()
        for key, (low, high) in rules.items():
            if draw.chance(0.2):
                found.append(f"{key} {missing}")
                continue
            value = draw.either(
                str(draw.number(low, high)),
                str(draw.number(low, high)),
                str(low),
                str(high),
                str(high + 1),
                draw.word(),
                str(low - draw.number(1, 9)),
            )
            settings[key] = value
            if not value.lstrip("-").isdigit() or not low <= int(value) <= high:
                found.append(f"{key} {invalid} {value}")
        for key in draw.some(sorted(set(_KEYS) - set(rules)), draw.number(0, 2)):
            settings[key] = str(draw.number(1, 99))
            found.append(f"{key} {unknown}")
        return rules, {key: settings[key] for key in draw.some(sorted(settings), len(settings))}, sorted(found)

    def schema(rules: Mapping[str, tuple[int, int]]) -> str:
        return lines(f"{key} {low} {high}" for key, (low, high) in rules.items())

    visible, (rules, settings, found) = example(), example()
    if not found:
        return _validate(draw)
    fine = {key: str(draw.number(low, high)) for key, (low, high) in rules.items()}
    program = f"""
import re, sys
rules = {{key: (int(low), int(high)) for key, low, high in (line.split() for line in open(sys.argv[2]))}}
settings = dict(line.strip().split(" = ") for line in open(sys.argv[1]))
found = []
for key in rules.keys() | settings.keys():
    if key not in settings:
        found.append(f"{{key}} {missing}")
    elif key not in rules:
        found.append(f"{{key}} {unknown}")
    else:
        value, (low, high) = settings[key], rules[key]
        if not re.fullmatch("-?[0-9]+", value) or not low <= int(value) <= high:
            found.append(f"{{key}} {invalid} {{value}}")
print(*sorted(found), sep="\\n" if found else "")
sys.exit(bool(found))
"""
    return DrawnTask(
        instruction=f"Write a Python program {script}, run as `python3 {script} CONFIG SCHEMA`, as in `python3 "
        f"{script} app.conf app.schema`, which validates a configuration. A line of CONFIG is KEY = VALUE; a line of "
        f"SCHEMA is KEY LOW HIGH. Print `KEY {missing}` for a key of the schema that is not in the configuration, `KEY "
        f"{unknown}` for a key that is not in the schema, and `KEY {invalid} VALUE` if the value is not an integer "
        "from LOW to HIGH (both included). Sort the lines. The exit status is 1 if there are such lines and 0 "
        "otherwise. It is run on other files too.",
        files={"app.conf": _plain(visible[1]), "app.schema": schema(visible[0])},
        solution=write_file(script, program),
        checks=[
            *run_case(
                f"python3 {script} c s", files={"c": _plain(settings), "s": schema(rules)}, stdout=lines(found), exit=1
            ),
            *run_case(f"python3 {script} c s", files={"c": _plain(fine), "s": schema(rules)}, stdout=""),
        ],
    )


def _layers(draw: Draw) -> DrawnTask:
    script, word, base = draw.script("py"), draw.either("unset", "delete", "none", "null"), draw.word()

    def example() -> tuple[dict[str, str], str, list[str]]:
        names = draw.words(4)
        data: Sections = {}
        files = {}
        for number, name in enumerate(names):
            text = [] if number == 0 else [f"{base} = {draw.one(names[:number])}.conf"]
            own: dict[str, str] = {}
            for key in draw.some(_KEYS, draw.number(3, 6)):
                own[key] = word if number and draw.chance(0.25) else str(draw.number(1, 9999))
            parent = text[0].split(" = ")[1].removesuffix(".conf") if text else ""
            merged = dict(data.get(parent, {}))
            for key, value in own.items():
                if value == word:
                    merged.pop(key, None)
                else:
                    merged[key] = value
            data[name] = merged
            text += [f"{key} = {value}" for key, value in own.items()]
            files[f"{name}.conf"] = f"# {draw.sentence()}\n\n" + lines(draw.some(text, len(text)))
        last = names[3]
        return files, f"{last}.conf", [f"{key} = {data[last][key]}" for key in sorted(data[last])]

    visible, (files, last, found) = example(), example()
    program = f"""
import os, sys
def load(path):
    settings = dict(line.strip().split(" = ") for line in open(path) if line.strip() and not line.startswith("#"))
    base = settings.pop("{base}", None)
    merged = load(os.path.join(os.path.dirname(path), base)) if base else {{}}
    merged.update(settings)
    return {{key: value for key, value in merged.items() if value != "{word}"}}
for key, value in sorted(load(sys.argv[1]).items()):
    print(key, "=", value)
"""
    return DrawnTask(
        instruction="The lines of the files conf/*.conf are KEY = VALUE, comments (starting with #) or empty. The key "
        f"{base} is special: its value is the name of another file in the same folder, from which the file inherits "
        "all settings. The settings of the file itself, wherever they are in it, replace inherited ones, and the "
        f"value {word} removes an inherited setting. Write a Python program {script}, run as `python3 {script} FILE`, "
        f"as in `python3 {script} conf/{visible[1]}`, which prints the resulting settings as lines KEY = VALUE, sorted "
        f"by key, without {base} and removed ones. It is run on other files too, from other folders.",
        files=under("conf", visible[0]),
        solution=write_file(script, program),
        checks=run_case(f"python3 {script} h/{last}", files=under("h", files), stdout=lines(found)),
    )


def _edit(draw: Draw) -> DrawnTask:
    script = draw.script("py")

    def example() -> tuple[Sections, dict[str, str], list[tuple[str, str, str]]]:
        sections = _sections(draw, 4)
        comments = {name: f"# {draw.sentence()}\n" for name in sections if draw.chance(0.6)}
        changes = []
        for name in [*draw.some(list(sections), 3), draw.word() + "-new"]:
            key = (
                draw.one(list(sections[name]))
                if name in sections and draw.chance(0.6)
                else f"{draw.word()}_{draw.one(_KEYS)}"
            )
            changes.append((name, key, f"{draw.word()}{draw.number(1, 99)}"))
        return sections, comments, changes

    visible, (sections, comments, changes) = example(), example()
    after = {name: dict(settings) for name, settings in sections.items()}
    for name, key, value in changes:
        after.setdefault(name, {})[key] = value
    program = """
import sys
path, name, value = sys.argv[1:]
section, key = name.split(".", 1)
text = open(path).read().splitlines()
start = next((number for number, line in enumerate(text) if line == f"[{section}]"), None)
if start is None:
    text += ["", f"[{section}]", f"{key} = {value}"]
else:
    last = start
    for number in range(start + 1, len(text)):
        if text[number].startswith("["):
            break
        if " = " in text[number] and not text[number].startswith("#"):
            last = number
            if text[number].split(" = ")[0] == key:
                text[number] = f"{key} = {value}"
                break
    if not any(line == f"{key} = {value}" for line in text[start : last + 1]):
        text.insert(last + 1, f"{key} = {value}")
open(path, "w").write("\\n".join(text) + "\\n")
"""
    hidden = f"{draw.word()}-{draw.number(1000, 9999)}.sh"
    driver = "".join(f"python3 {script} other.ini {name}.{key} {value} || exit 1\n" for name, key, value in changes)
    return DrawnTask(
        instruction=f"Write a Python program {script}, run as `python3 {script} FILE SECTION.KEY VALUE`, as in "
        f"`python3 {script} app.ini {visible[2][0][0]}.{visible[2][0][1]} 17`, which sets a value in an INI file in "
        "place. Its lines are [SECTION], KEY = VALUE, comments (starting with #) or empty. All other lines stay "
        "exactly as they are. If the section has no such key, add the line KEY = VALUE directly after the last KEY = "
        "VALUE line of the section. If there is no such section, add an empty line, the section and the setting at "
        "the end of the file. It is run on other files too; do not change app.ini.",
        files={"app.ini": _ini(visible[0], comments=visible[1])},
        solution=write_file(script, program),
        checks=run_case(
            f"bash {hidden}",
            files={hidden: driver, "other.ini": _ini(sections, comments=comments)},
            then=file_case("other.ini", _ini(after, comments=comments)),
        ),
    )


FAMILY = Family(
    name="config",
    summary="Read, edit, merge, validate and repair configuration files.",
    kinds={
        1: (_set_value, _get_value, _append),
        2: (_set_in_section, _comment, _set_json),
        3: (_override, _to_json, _repair_json),
        4: (_template, _validate),
        5: (_layers, _edit),
    },
)
