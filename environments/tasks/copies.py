"""A check that the answers are not in the agent's sandbox: envkit itself, or the package that a task is about."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

from envkit.errors import UsageError
from envkit.protocols import Sandbox, SandboxPool
from envkit.types import GRADER_HOME, SandboxSpec

_FIND = """
find_in() {
    for path in "$1"/lib/python3*/*-packages/"$name" "$1"/lib/python3*/*-packages/"$name".py "$2"; do
        [ ! -e "$path" ] || echo "$path"
    done
}
cd /
for name in "$@"; do
    for place in /usr /usr/local /root/.local /home/*/.local; do find_in "$place" ""; done
    for place in /opt/*; do find_in "$place" "$place/$name"; done
    while read -r _ place _; do find_in "$place" ""; done < /proc/mounts
    python3 -c '
import importlib.util, sys
found = importlib.util.find_spec(sys.argv[1])
if found is not None: print(found.origin or sys.argv[1])
' "$name" 2> /dev/null
done
"""
_CLEAN: WeakKeyDictionary[SandboxPool, set[Hashable]] = WeakKeyDictionary()


async def require_no_copies(
    sandboxes: SandboxPool, sandbox: Sandbox, spec: SandboxSpec, modules: Sequence[str]
) -> None:
    """Raise an error if envkit or one of `modules` is in a sandbox; looked up once per pool, image and modules.

    Sandboxes of the backend ``process`` are not checked: they isolate nothing, and show all of this machine.

    Raises:
        UsageError: The sandbox has a copy; the message has its place.
    """
    clean = _CLEAN.setdefault(sandboxes, set())
    key = (spec.image, spec.untrusted, spec.profile, tuple(modules))
    if key in clean or sandbox.grader_home != GRADER_HOME:
        return
    for name in ("envkit", *modules):
        found = await sandbox.exec(["sh", "-c", _FIND, "sh", name])
        if copies := found.stdout.splitlines():
            raise UsageError(
                f"{name} is installed in the sandbox, at {copies[0]}, where the agent can read the answers; "
                "uninstall it, or use an image without it (without an image, a spec with untrusted=True hides packages)"
            )
    clean.add(key)
