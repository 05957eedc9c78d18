"""The agent's main program: accepts channels from the host, dispatches their calls and ends the sandbox."""

from __future__ import annotations

import gc
import os
import select
import sys
import time
from _socket import AF_UNIX, SOCK_STREAM, socket

from . import gauges
from .connection import CallError, HostConnection, IncomingCall
from .event_loop import Loop
from .exec import commands, process_tree, worker
from .exec.outputs import Output, OutputTail
from .exec.shell import PersistentShell, ShellCall
from .files import files
from .framing import encoded
from .users import Context

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from .connection import Header
    from .event_loop import Timer
    from .framing import Json
else:
    import _signal as signal

_LOG_BYTES = 64 << 10
_STDERR_TAIL_BYTES = 4096
_BROKEN = 3


class Agent:
    """The agent: process 1 of a sandbox, or at least the ancestor of all its processes."""

    def __init__(self, hello: bytes) -> None:
        self.loop = Loop(self._on_crash, self._on_signal)
        self._context = Context(self.loop)
        self._context.on_oom_kill = self._on_oom_kill
        self._hello = hello
        self._began = time.monotonic()
        self._is_detached = False
        self._orphan_ttl_s: float | None = None
        self._channels = 0
        self._connections: list[HostConnection] = []
        self._orphan_timer: Timer | None = None
        self._last_client_at = 0.0
        self._shells: dict[tuple[str, str], PersistentShell] = {}
        self._log = OutputTail(_LOG_BYTES)
        self._stderr: Output | None = None
        self._calls: dict[str, Callable[..., IncomingCall]] = {
            "exec": commands.Exec,
            "read": files.Read,
            "write": files.Write,
        }
        self._queries: dict[str, Callable[[HostConnection, Header], dict[str, Json]]] = {
            "ping": self._ping,
            "stats": self._stats,
            "resize": self._resize,
        }

    def open(self, reader: int, writer: int, *, on_over: Callable[[str, str], None]) -> HostConnection:
        """Serve a new channel. It counts as a client, unless the host sends a configuration with ``as_observer``."""
        is_client = True
        self._channels += 1
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()

        def configured(config: Header) -> None:
            nonlocal is_client
            if config.get("as_observer") and is_client:
                is_client = False
                self._remove_client()
            else:
                self._configure(config)

        def over(kind: str, why: str) -> None:
            self._connections.remove(connection)
            on_over(kind, why)
            if is_client:
                self._last_client_at = time.monotonic()
                self._remove_client()

        connection = HostConnection(self.loop, reader, writer, start=self._start, on_config=configured, on_over=over)
        self._connections.append(connection)
        return connection

    def _remove_client(self) -> None:
        """Count one client less. If `_orphan_ttl_s` is set, the sandbox ends this time after its last client left."""
        self._channels -= 1
        if self._channels == 0 and self._orphan_ttl_s is not None:
            remaining_s = max(self._last_client_at + self._orphan_ttl_s - time.monotonic(), 0.0)
            self._orphan_timer = self.loop.after(remaining_s, lambda: self._abort("orphaned", "no client came back"))

    def leave(self, code: int, kind: str) -> None:
        """Report to the host why the sandbox ends, kill all its processes and exit."""
        for connection in self._connections:
            connection.send_last({"ending": kind})
        if os.getpid() != 1:
            process_tree.kill_descendants()
        os._exit(code)

    def _configure(self, config: Header) -> None:
        if self._context.users:
            return  # Only the first channel configures the sandbox; this is a later one.
        self._context.configure(config)
        if os.getpid() == 1 and self._context.user("agent").uid is None:
            # A program of the same user may have sent it. Unlike SIGKILL, it would reach us from within the sandbox.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._is_detached = bool(config.get("detached"))
        if config.get("orphan_ttl_s") is not None:
            self._orphan_ttl_s = float(config["orphan_ttl_s"])
        if config.get("ttl_s") is not None:
            self.loop.after(float(config["ttl_s"]), lambda: self._abort("expired", "time to live exceeded"))
        if config.get("control_socket"):
            self._open_control_socket(config["control_socket"])
        if config.get("command"):
            self._run_command(config["command"])
        self.loop.after(0, self._warm)

    def _warm(self) -> None:
        gc.collect()
        # Exclude the existing objects from garbage collection, which would write to memory shared with workers.
        gc.freeze()
        self._context.workers.give_back(self._context.workers.take(self._context.user("agent")))

    def _run_command(self, argv: list[str]) -> None:
        context = self._context
        if "/" not in argv[0] or argv[0].startswith("/"):
            try:
                context.find(argv[0])
            except CallError:  # Exit before the first reply, so that the host reports a failed start.
                self._write_stderr(b"%s: No such file or directory\n" % encoded(argv[0]))
                self.leave(127, "exited")
        user = context.user("agent")
        ours, theirs = user.pipe()
        nothing = [os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)]
        self._stderr = Output(self.loop, ours, self._log.add, self)
        folder = encoded(context.work)
        request = worker.encode_request([encoded(part) for part in argv], context.environment(user), folder, (0, 1, 2))
        exec_worker = context.workers.take(user)
        # The sandbox ends when its command ends, so the command must not be killed to free pids.
        context.workers.protect(exec_worker)
        exec_worker.run(request, [*nothing, theirs], self._on_command_ended)

    def _on_command_ended(self, code: int, left: bool) -> None:
        if self._stderr is not None:
            self._stderr.take_waiting()
        self._write_stderr(self._log.peek()[-_STDERR_TAIL_BYTES:])
        code = code if code >= 0 else 128 - code
        if code == 128 + signal.SIGKILL and self._context.hit_limit_recently():
            self.leave(_BROKEN, "out_of_memory")
        self.leave(code, "exited")

    def _abort(self, kind: str, why: str) -> None:
        self._write_stderr(why.encode() + b"\n")
        self.leave(_BROKEN, kind)

    def _start(self, connection: HostConnection, number: int, header: Header) -> IncomingCall | None:
        name = header["do"]
        if not self._context.users:
            raise CallError("bad", "the host made a call before it sent the configuration")
        if name in self._queries:
            connection.send({"id": number, "end": True, **self._queries[name](connection, header)})
            return None
        if name == "shell":
            return self._run_in_shell(connection, number, header)
        if name == "close_shell":
            return self._close_shell(connection, number, header)
        if name == "log":
            if self._stderr is not None:
                self._stderr.take_waiting()
            return _Log(connection, number, self._log.peek())
        if name in ("pack", "unpack"):
            from .files import copy  # Loaded on demand, because most sandboxes never copy folders.

            return (copy.Pack if name == "pack" else copy.Unpack)(self._context, connection, number, header)
        if name == "forward":
            from . import port_forward

            return port_forward.Forward(self._context, connection, number, header)
        if name not in self._calls:
            raise CallError("unsupported", "unknown call %s" % name)
        return self._calls[name](self._context, connection, number, header)

    def _run_in_shell(self, connection: HostConnection, number: int, header: Header) -> IncomingCall:
        key = header["name"], header.get("user", "agent")
        shell = self._shells.get(key)
        if shell is None:
            shell = self._shells[key] = PersistentShell(self._context, self._context.user(key[1]))
        call = ShellCall(shell, connection, number, header)
        shell.run(call)
        return call

    def _close_shell(self, connection: HostConnection, number: int, header: Header) -> IncomingCall:
        call = IncomingCall(connection, number)
        # The host puts the user into the name of the shell, so at most one shell has this name.
        key = next((key for key in self._shells if key[0] == header["name"]), None)

        def closed() -> None:
            if not call.is_over:
                call.finish()

        if key is None:
            closed()
        else:
            self._shells.pop(key).close(closed)
        return call

    def _resize(self, connection: HostConnection, header: Header) -> dict[str, Json]:
        call = connection.call(header["of"])
        if not isinstance(call, commands.Exec):
            raise CallError("missing", "no running program has this call id")
        call.resize(int(header["rows"]), int(header["cols"]))
        return {}

    def _ping(self, connection: HostConnection, header: Header) -> dict[str, Json]:
        self._context.report_oom_kills()
        return {}

    def _on_oom_kill(self, count: int) -> None:
        for connection in self._connections:
            connection.send({"oom_kills": count})

    def _stats(self, connection: HostConnection, header: Header) -> dict[str, Json]:
        alive = process_tree.alive_below([os.getpid()], process_tree.table())
        found: dict[str, Json] = {"processes": len(alive), "uptime_s": round(time.monotonic() - self._began, 3)}
        memory = gauges.memory_in_use()
        if memory is not None:
            found["memory_bytes"] = memory
        found.update(gauges.fullest())
        return found

    def _open_control_socket(self, path: str) -> None:
        """Listen at the Unix socket `path` for further channels."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        self._control_socket = socket(AF_UNIX, SOCK_STREAM)
        self._control_socket.bind(path)
        os.chmod(path, 0o600)
        self._control_socket.listen(16)
        self._control_socket.setblocking(False)
        self.loop.watch(self._control_socket.fileno(), on_read=self._admit).want(read=True)

    def _admit(self) -> None:
        try:
            fd, _ = self._control_socket._accept()  # type: ignore[attr-defined]
        except BlockingIOError:
            return
        self.open(fd, os.dup(fd), on_over=lambda kind, why: None).send_raw(self._hello)

    def on_first_over(self, kind: str, why: str) -> None:
        """End the sandbox, whose first channel is closed, unless it is detached."""
        if not self._is_detached:
            is_broken = kind == "protocol_error"
            if is_broken:
                self._write_stderr(why.encode() + b"\n")
            self.leave(_BROKEN if is_broken else 0, kind)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._context.workers.reap()
        elif number == signal.SIGTERM:
            self.leave(128 + number, "killed")

    def _on_crash(self, owner: object, error: Exception) -> None:
        text = "%s: %s" % (type(error).__name__, error)
        trace = error.__traceback__
        while trace is not None:
            text += " < %s:%d" % (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            trace = trace.tb_next
        self._log.add(text.encode(errors="replace") + b"\n")
        crashed = getattr(owner, "crashed", None)
        if crashed is not None:
            crashed(text)

    def _write_stderr(self, text: bytes) -> None:
        """Write to the agent's standard error; drop the text if writing would block."""
        poller = select.poll()
        poller.register(2, select.POLLOUT)
        try:
            if text and poller.poll(0):
                os.write(2, text[-_STDERR_TAIL_BYTES:])
        except OSError:
            pass


class _Log(IncomingCall):
    def __init__(self, connection: HostConnection, number: int, content: bytes) -> None:
        super().__init__(connection, number)
        self.finish_with(iter([*self.pieces("data", content), self.end_frame()]))


def main(reader: int, writer: int, hello: bytes) -> None:
    """Run the agent on its first channel, on which the bootstrap has already sent the frame `hello`. Never returns."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getuid() == 0:
        os.setgroups([])
    agent = Agent(hello)
    agent.open(reader, writer, on_over=agent.on_first_over)
    agent.loop.run()
    sys.exit(1)
