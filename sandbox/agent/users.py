"""The agent's state that all calls share: event loop, workers, users, environment variables and working directory."""

from __future__ import annotations

import os
import time

from . import gauges, linux
from .connection import CallError
from .exec import worker
from .exec.workers import Workers
from .framing import encoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from .connection import Header
    from .event_loop import Loop
else:
    import _signal as signal


_RECENT_S = 1.0
"""If a command is killed at most this number of seconds after an OOM kill was seen, that kill counts as the cause."""
_CHECK_S = 0.5
"""Seconds between two checks for OOM kills; the checks also find kills of background programs."""


class Context:
    """The agent's state that all calls share.

    Attributes:
        loop: The event loop.
        workers: The worker processes that run programs.
        on_oom_kill: Receives the total number of OOM kills whenever it changes.
        users: Users by name; empty until the host has sent the configuration.
        work: Working directory of the agent user's programs. Relative file paths start there.
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
        self._reported_at = -_RECENT_S
        self._limit_hits = 0
        self._was_limit_hit = False
        if self._reported is not None:
            self._check()

    def configure(self, config: Header) -> None:
        """Set users, working directory and environment variables from the host's configuration.

        Where the agent has a user id of its own, the home of root is that of graders, which the agent cannot enter.
        """
        is_root = os.getuid() == 0
        home = config.get("grader_home")
        # Without a user id of their own, graders run as the agent's user, which can then write to their home.
        grader_uid = config.get("grader_uid") if is_root else None
        self.users = {
            "agent": linux.User(config.get("agent_uid") if is_root else None, preemptible=True),
            "grader": linux.User(
                grader_uid, _private(home if home and grader_uid is not None else "/"), is_private=True
            ),
        }
        if config.get("root") and is_root:
            own = home if config.get("agent_uid") is not None else None
            self.users["root"] = linux.User(None, _private(own) if own else {})
        self.work = config.get("work") or "/"
        self._grader_home = home or ""
        self._env = _encoded(config.get("env"))

    def user(self, name: str) -> linux.User:
        """Return the user `name`.

        Raises:
            CallError: The sandbox has no such user.
        """
        if not self.users:
            raise CallError("bad", "the host made a call before it sent the configuration")
        if name not in self.users:
            raise CallError("unsupported", "this sandbox cannot run programs as %s" % name)
        return self.users[name]

    def owner(self, header: Header) -> linux.User:
        """Return the user with whose rights a call with `header` reads or writes files; never root.

        Raises:
            CallError: The sandbox has no such user, or the user is root.
        """
        name = header.get("user", "agent")
        if name == "root":
            raise CallError("unsupported", "this sandbox cannot read or write files as root")
        return self.user(name)

    def environment(self, user: linux.User, more: dict[str, str] | None = None) -> dict[bytes, bytes]:
        """Return the environment of a program: the sandbox's variables, overridden by the user's, then by `more`."""
        return {**self._env, **user.env, **_encoded(more)}

    def start_folder(self, user: linux.User) -> str:
        """Return the default working directory of the programs of `user`.

        A grader starts in its own home, because the agent user could place Python modules in other folders, and the
        grader's Python would import them.
        """
        return self._grader_home if self._grader_home and user is self.users.get("grader") else self.work

    def inside(self, path: bytes) -> bytes:
        """Return `path`; a relative path is joined to the working directory."""
        return os.path.join(encoded(self.work), path)

    def find(self, program: str) -> bytes:
        """Return the path of `program`, which is searched on the PATH of the sandbox.

        Raises:
            CallError: `program` was not found.
        """
        for folder in (self._env.get(b"PATH", b"") + b":" + worker.PATH).split(b":"):
            path = os.path.join(folder, program.encode())
            if folder and os.access(path, os.X_OK):
                return path
        raise CallError("unsupported", "%s not found on the sandbox's PATH" % program)

    def report_oom_kills(self) -> int | None:
        """Report new OOM kills to the host; return the total number of kills, or None if it is unknown."""
        kills = gauges.kill_count() if self._reported is not None else None
        if kills is not None and kills != self._reported:
            self._reported, self._reported_at = kills, time.monotonic()
            hits = gauges.limit_hits()
            self._was_limit_hit, self._limit_hits = hits > self._limit_hits, hits
            self.on_oom_kill(kills)
        return kills

    def _check(self) -> None:
        self.loop.after(_CHECK_S, self._check)
        # With cgroup v1, the number of limit hits can decrease: the host resets the peak memory use after each report.
        if self._limit_hits:
            self._limit_hits = min(self._limit_hits, gauges.limit_hits())
        self.report_oom_kills()

    def hit_limit_recently(self) -> bool:
        """Return whether the sandbox's own memory limit has caused an OOM kill within the last second.

        With cgroup v1 and a host that cannot reset the peak memory use, this is False for all kills but the first.
        """
        self.report_oom_kills()
        return self._was_limit_hit and time.monotonic() - self._reported_at < _RECENT_S

    def out_of_memory(self, code: int | None) -> dict[str, bool]:
        """Return ``{"oom": True}`` if an OOM kill happened since the last call of this method, else ``{"oom": False}``.

        Returns an empty dict if OOM kills are not visible, or if exit code `code` means that no kill ended the program.
        """
        if self._kills is None or code not in (None, -int(signal.SIGKILL), 128 + int(signal.SIGKILL)):
            return {}
        before, self._kills = self._kills, self.report_oom_kills()
        return {"oom": self._kills != before}


def _private(home: str) -> dict[bytes, bytes]:
    """Return the variables of programs that use no settings and packages of the agent user."""
    return {b"HOME": encoded(home), b"PYTHONNOUSERSITE": b"1"}


def _encoded(variables: dict[str, str] | None) -> dict[bytes, bytes]:
    found = {}
    for name, value in (variables or {}).items():
        if not name or "=" in name:
            raise CallError("bad", "invalid name of an environment variable: %r" % name)
        found[encoded(name)] = encoded(value)
    return found
