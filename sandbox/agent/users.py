"""What the calls of a box work with: its loop and workers, its users, their variables, and the folder they start in."""

from __future__ import annotations

import os
import time

from . import gauges, linux
from .connection import CallError
from .exec import worker
from .exec.workers import Workers
from .json_fallback import encoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from .connection import Header
    from .event_loop import Loop
else:
    import _signal as signal


_RECENT_S = 1.0
"""What a killed process has at most until its parent hears of it, while its memory is given back."""
_CHECK_S = 0.5
"""How often OOM kills are counted, so that also those of background programs are reported soon."""


class Context:
    """One for all calls.

    Attributes:
        loop: What waits.
        workers: What programs run in.
        on_oom_kill: Told how many processes were killed for want of memory, when that is another number than before.
        users: By the names that a call uses; none before the configuration.
        work: Folder that the agent's programs start in, and that paths of files are relative to.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.workers = Workers(loop)
        self.users: dict[str, linux.User] = {}
        self.work = "/"
        self._grader_home = ""
        self._env: dict[bytes, bytes] = {}
        self.on_oom_kill: Callable[[int], None] = lambda count: None
        self._kills = self._reported = gauges.kill_count()
        self._reported_at = -_LATELY_S
        self._limit_hits = 0
        self._was_limit_hit = False
        if self._reported is not None:
            self._check()

    def configure(self, config: Header) -> None:
        """Take in who there is, and what they work with."""
        is_root = os.getuid() == 0
        self.users = {
            "agent": linux.User(config.get("agent_uid") if is_root else None, preemptible=True),
            "grader": _grader(config.get("grader_uid") if is_root else None, config.get("grader_home")),
        }
        self.workers.agent = self.users["agent"]
        if config.get("root") and is_root:
            self.users["root"] = linux.User(None)
        self.work = config.get("work") or "/"
        self._grader_home = config.get("grader_home") or ""
        self._env = _encoded(config.get("env"))

    def user(self, name: str) -> linux.User:
        """Return a user.

        Raises:
            CallError: This box has none of that name.
        """
        if not self.users:
            raise CallError("bad", "a call before the configuration")
        if name not in self.users:
            raise CallError("unsupported", "this box runs nothing as %s" % name)
        return self.users[name]

    def owner(self, header: Header) -> linux.User:
        """Return with whose rights a call reads or writes files; root's are for nobody.

        Raises:
            CallError: This box has none of that name.
        """
        name = header.get("user", "agent")
        if name == "root":
            raise CallError("unsupported", "this box reads and writes no files as root")
        return self.user(name)

    def environment(self, user: linux.User, more: dict[str, str] | None = None) -> dict[bytes, bytes]:
        """Return the variables of the box, those of the user, and `more`."""
        return {**self._env, **user.env, **_encoded(more)}

    def start_folder(self, user: linux.User) -> str:
        """Return where programs of `user` start: a grader's in its own home, where the agent cannot leave modules."""
        return self._grader_home if self._grader_home and user is self.users.get("grader") else self.work

    def inside(self, path: bytes) -> bytes:
        """Return `path` as seen from the folder that things start in."""
        return os.path.join(encoded(self.work), path)

    def find(self, program: str) -> bytes:
        """Return where `program` is.

        Raises:
            CallError: This box has none.
        """
        for folder in (self._env.get(b"PATH", b"") + b":" + worker.PATH).split(b":"):
            path = os.path.join(folder, program.encode())
            if folder and os.access(path, os.X_OK):
                return path
        raise CallError("unsupported", "this box has no %s" % program)

    def report_oom_kills(self) -> int | None:
        """Report OOM kills that the sandbox survived; return their number, None where that is not known."""
        kills = gauges.kill_count() if self._reported is not None else None
        if kills is not None and kills != self._reported:
            self._reported, self._reported_at = kills, time.monotonic()
            hits = gauges.limit_hits()
            self._was_limit_hit, self._limit_hits = hits > self._limit_hits, hits
            self.on_oom_kill(kills)
        return kills

    def _check(self) -> None:
        self.loop.after(_CHECK_S, self._check)
        if self._limit_hits:  # the host resets the peaks of version 1 once it has a report
            self._limit_hits = min(self._limit_hits, gauges.limit_hits())
        self.report_oom_kills()

    def hit_limit_recently(self) -> bool:
        """Say whether the sandbox's own limit was hit, with an OOM kill, within the last second, as far as known.

        False after an earlier hit on version 1, where the host cannot reset the peak.
        """
        self.report_oom_kills()
        return self._was_limit_hit and time.monotonic() - self._reported_at < _RECENT_S

    def out_of_memory(self, code: int | None) -> dict[str, bool]:
        """Say, where the kernel tells and `code` lets one ask, whether memory ran out since the last question."""
        if self._kills is None or code not in (None, -int(signal.SIGKILL), 128 + int(signal.SIGKILL)):
            return {}
        before, self._kills = self._kills, self.report_oom_kills()
        return {"oom": self._kills != before}


def _grader(uid: int | None, home: str | None) -> linux.User:
    """Return the user whose programs read no settings that the agent's may have written, and whose files are its own.

    Args:
        uid: Its number; None where it is one with the agent's user, which may write in its home then.
        home: The folder that it alone can enter.
    """
    folder = home if home and uid is not None else "/"
    return linux.User(uid, {b"HOME": encoded(folder), b"PYTHONNOUSERSITE": b"1"}, is_private=True)


def _encoded(variables: dict[str, str] | None) -> dict[bytes, bytes]:
    found = {}
    for name, value in (variables or {}).items():
        if not name or "=" in name:
            raise CallError("bad", "a variable cannot have the name %r" % name)
        found[encoded(name)] = encoded(value)
    return found
