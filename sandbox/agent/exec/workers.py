"""Pre-forked workers: processes with a user's rights that each run commands one after another.

Forking is most of a command's cost. Workers are therefore forked in advance, and some are kept.

Graders and file transfers must start even if the programs of the agent user have used up the sandbox's limits. The
agent user's programs are therefore killed if fewer than 32 pids are free when a grader or a transfer needs one. The
agent user's programs also run in a memory cgroup of their own, whose limit leaves memory for graders.
"""

from __future__ import annotations

import os
import struct
from _socket import SCM_RIGHTS, SOL_SOCKET, socketpair

from .. import linux
from . import process_tree, worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..event_loop import Loop
    from .process_tree import Table

_MAX_IDLE = 2
"""Maximum number of idle workers that are kept for each user."""
_RESERVE = 32
"""Number of pids kept free for graders, root and file transfers; at most a quarter of the sandbox's process limit."""
_NICENESS = 5
"""Niceness of preemptible processes in a cgroup, so that a fork bomb does not keep the agent process from answering."""
_CHECK_S = 0.01
_RETRY_S = 0.5
"""Seconds until the next check of free pids, if the last check found no process to kill."""
LOST = -9
"""Exit code of a command whose worker was killed."""


class Worker:
    """The agent's handle of a worker process."""

    def __init__(self, workers: Workers, user: linux.User) -> None:
        ours, theirs = socketpair()
        us = os.getpid()
        number = theirs.fileno()
        self.pid = workers.fork(lambda: worker.serve(number, user, us), preemptible=user.preemptible)
        theirs.close()
        ours.setblocking(False)
        self.user = user
        self.busy = False
        self._workers = workers
        self._line = ours
        self._unsent = b""
        self._on_started: Callable[[int], None] | None = None
        self._on_ended: Callable[[int, bool], None] | None = None
        self._watch = workers.loop.watch(ours.fileno(), on_read=self._on_answer, on_write=self._send, owner=self)
        self._watch.want(read=True)

    def run(
        self,
        request: bytes,
        files: list[int],
        on_ended: Callable[[int, bool], None],
        on_started: Callable[[int], None] | None = None,
    ) -> None:
        """Run a command in the worker. Closes this process's copies of `files`.

        Args:
            request: The request from `worker.encode_request`.
            files: Descriptors that the command inherits.
            on_ended: Receives the exit code (negative for a signal), and whether processes that the command started may
                still run. Called even if another process killed the worker.
            on_started: Receives the pid of the command, if the request asks for it.
        """
        self.busy = True
        self._on_ended = on_ended
        self._on_started = on_started
        try:
            attached = [(SOL_SOCKET, SCM_RIGHTS, struct.pack("%di" % len(files), *files))]
            sent = self._line.sendmsg([request], attached)
        except OSError:  # The worker was killed while it was idle.
            self._workers.loop.soon(self._lost, self)
            return
        finally:
            for fd in files:
                os.close(fd)
        self._unsent = request[sent:]
        if self._unsent:
            self._watch.want(write=True)

    def kill(self, then: Callable[[], None], owner: object) -> None:
        """Kill the worker and all processes that it started, then call `then`. Does not call `on_ended` of `run`."""
        self._on_ended = self._on_started = None
        self.close()
        self._workers.end(self.pid, then, owner)

    def close(self) -> None:
        """Close the connection to the worker. The worker then exits when its current command has ended."""
        self._watch.close()
        self._line.close()
        self._workers.discard(self)

    def crashed(self, text: str) -> None:
        self._lost()

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self._line.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._lost()
            return
        if not self._unsent:
            self._watch.want(write=False)

    def _on_answer(self) -> None:
        try:
            answer = self._line.recv(worker.ANSWER.size)
        except OSError:
            answer = b""
        if len(answer) < worker.ANSWER.size:
            self._lost()
            return
        kind, value, left = worker.ANSWER.unpack(answer)
        if kind == worker.STARTED:
            if self._on_started is not None:
                self._on_started(value)
            return
        self.busy = False
        self._report(value, bool(left))

    def _lost(self) -> None:
        self.close()
        self._report(LOST, True)

    def _report(self, code: int, left: bool) -> None:
        on_ended, self._on_ended = self._on_ended, None
        if on_ended is not None:
            on_ended(code, left)


class Workers:
    """All child processes of the agent process: workers, file transfers and adopted orphans.

    Attributes:
        loop: The agent's event loop.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._all: set[Worker] = set()
        self._idle: dict[linux.User, list[Worker]] = {}  # `take` pops the last one
        self._children: dict[int, Callable[[int], None] | None] = {}
        # Pids of the children that may be killed, together with their descendants, to free pids.
        self._preemptible: set[int] = set()
        self._is_checking = False
        self._bound = linux.processes(".max") if os.getpid() == 1 else None
        self._lent = linux.lent_files()
        self._first_to_die: linux.FirstToDie | None = None

    def take(self, user: linux.User) -> Worker:
        """Return an idle or new worker of `user`. The caller must pass it to `give_back` or kill it.

        Raises:
            OSError: No process can be forked.
        """
        if not user.preemptible:
            self._ensure_free_pids()
            if not self._is_checking:
                self._check_later(_CHECK_S)
        idle = self._idle.get(user)
        while idle:
            exec_worker = idle.pop()
            # Skip a worker that was killed to free pids, and is therefore no longer a child.
            if exec_worker.pid in self._children:
                return exec_worker
        exec_worker = Worker(self, user)
        self._all.add(exec_worker)
        return exec_worker

    def give_back(self, exec_worker: Worker) -> None:
        """Keep a worker whose command has ended for a later `take`, or close it if `_MAX_IDLE` are idle already."""
        idle = self._idle.setdefault(exec_worker.user, [])
        if len(idle) < _MAX_IDLE:
            idle.append(exec_worker)
        else:
            exec_worker.close()

    def discard(self, exec_worker: Worker) -> None:
        self._all.discard(exec_worker)
        idle = self._idle.get(exec_worker.user, [])
        if exec_worker in idle:
            idle.remove(exec_worker)

    def protect(self, exec_worker: Worker) -> None:
        """Make sure that the processes of this worker are never killed to free pids."""
        self._preemptible.discard(exec_worker.pid)

    def fork(
        self,
        run: Callable[[], None],
        on_exit: Callable[[int], None] | None = None,
        *,
        preemptible: bool = False,
        is_charged: bool = False,
    ) -> int:
        """Fork a child that calls `run` and exits; return its pid.

        Args:
            run: Called in the child.
            on_exit: Called in the agent with the exit code of the child.
            preemptible: Whether the child and its descendants may be killed to free pids.
            is_charged: Whether the child's memory counts towards the limit of the agent user, as it always does for a
                preemptible child.

        Raises:
            OSError: No process can be forked.
        """
        if self._first_to_die is None:
            self._first_to_die = linux.FirstToDie(self._lent)  # before `hide_memory`, which would prevent it
            linux.adopt_orphans()
            linux.hide_memory()
        if not preemptible:
            self._ensure_free_pids()
        try:
            pid = self._first_to_die.fork() if preemptible else os.fork()
        except BlockingIOError:
            if preemptible or not self._free_pids():
                raise
            pid = os.fork()
        if not pid:
            try:
                if preemptible or is_charged:
                    self._first_to_die.join_group()
                if preemptible and self._bound is not None:
                    os.nice(_NICENESS)
                run()
                os._exit(0)
            except BaseException:
                os._exit(125)
        self._children[pid] = on_exit
        if preemptible:
            self._preemptible.add(pid)
        return pid

    def reap(self) -> None:
        """Reap all children that have exited, including adopted orphans."""
        for pid, status in process_tree.reap().items():
            on_exit = self._children.pop(pid, None)
            self._preemptible.discard(pid)
            if on_exit is not None:
                on_exit(process_tree.exit_code(status))

    def end(self, pid: int, then: Callable[[], None], owner: object) -> None:
        """Kill child `pid`, its descendants and the orphans of workers that have ended, then call `then`.

        If `then` raises, the loop passes `owner` to its callback `on_crash`.
        """

        def victims(running: Table) -> set[int]:
            roots = {pid} if pid in self._children else set()
            return process_tree.alive_below(roots | self._orphans(running), running)

        process_tree.kill_tree(self.loop, victims, then, owner)

    def _orphans(self, running: Table) -> set[int]:
        """Return the pids of children that this process did not fork, but adopted when their parents ended."""
        us = os.getpid()
        return {pid for pid, (parent, _) in running.items() if parent == us and pid not in self._children}

    def _ensure_free_pids(self) -> bool:
        """If too few pids are free, kill the preemptible processes. Return False only if there were none to kill."""
        if self._bound is None:
            return True
        count = linux.processes(".current")
        return count is None or self._bound - count >= min(_RESERVE, self._bound // 4) or self._free_pids()

    def _check_later(self, delay_s: float) -> None:
        self._is_checking = self._bound is not None
        if self._is_checking:
            self.loop.after(delay_s, self._check)

    def _check(self) -> None:
        """While a grader runs a command, keep enough pids free, and schedule the next check."""
        self._is_checking = False
        if any(exec_worker.busy and not exec_worker.user.preemptible for exec_worker in self._all):
            self._check_later(_CHECK_S if self._ensure_free_pids() else _RETRY_S)

    def _free_pids(self) -> bool:
        """Kill all preemptible processes and wait until they are gone; return whether there were any."""
        us = os.getpid()

        def victims(running: Table) -> set[int]:
            protected = process_tree.alive_below(self._children.keys() - self._preemptible, running)
            return process_tree.alive_below([us], running) - protected - {us}

        return process_tree.kill_all(victims, self.reap)
