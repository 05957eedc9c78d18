"""A command of bash that applies a patch, for sandboxes without git or patch."""

from __future__ import annotations

import json
import re

from envkit.types import JSON

from .runs import REPO

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_WRITE = """
import json, os, sys
for path, hunks in json.loads(sys.argv[1]).items():
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a+", encoding="utf-8", newline="") as file: lines = (file.seek(0), file.read())[1].split("\\n")
    for start, old, new in reversed(hunks):
        place = slice(start - 1, start - 1 + len(old))
        assert lines[place] == old, "the patch does not fit line %d of %s" % (start, path)
        lines[place] = new
    with open(path, "w", encoding="utf-8", newline="") as file: file.write("\\n".join(lines))
"""


def apply_command(patch: str) -> str:
    """Return a command of bash that applies a patch of existing files. It needs only Python."""
    edits: dict[str, list[JSON]] = {}
    path, lines = "", patch.split("\n")
    while lines:
        line = lines.pop(0)
        if line.startswith("+++ "):
            path = line[4:].partition("\t")[0].removeprefix("b/")
        elif (hunk := _HUNK.match(line)) is not None:
            old, new = (1 if count is None else int(count) for count in hunk.groups()[1:])
            start = int(hunk[1]) + (old == 0)  # a hunk without old lines comes after line `start`
            removed: list[JSON] = []
            added: list[JSON] = []
            edits.setdefault(path, []).append([start, removed, added])
            while lines and (old > 0 or new > 0):
                line = lines.pop(0) or " "
                old, new = old - (line[0] in " -"), new - (line[0] in " +")
                if line[0] in " -":
                    removed.append(line[1:])
                if line[0] in " +":
                    added.append(line[1:])
    return f"cd {REPO}\npython3 - <<'END' \n{_WRITE.replace('sys.argv[1]', repr(json.dumps(edits)))}\nEND"
