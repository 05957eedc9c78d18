"""One sandbox for many cases: started once a module, emptied after each case, and replaced if a case damaged it."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import anyio
import pytest

from envkit.errors import EnvkitError
from envkit.protocols import Sandbox
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.types import SandboxUser
from tests.contract.kinds import OF_HOST_IN_TMP, Backend, Kind
from tests.contract.remote import WorkingSandbox

AnySandbox: TypeAlias = AgentSandbox | WorkingSandbox

# Empties the folders that it is given, and lists what it could not remove; then lists the programs that still run,
# which are those that are neither of the agent nor this one.
_EMPTY = """
chmod u+rwx -- "$@" 2>/dev/null
find "$@" -xdev -mindepth 1 -maxdepth 1 {others} ! -type l -exec chmod -R u+rwx -- {{}} + 2>/dev/null
find "$@" -xdev -mindepth 1 -delete 2>/dev/null
find "$@" -xdev -mindepth 1 {others} {which} 2>/dev/null
"""
_OTHERS = " ".join(f"! -path {shlex.quote('/tmp/' + name)}" for name in OF_HOST_IN_TMP)
_PROGRAMS = """
for file in $(grep -La -e 'take(0,int(' /proc/[0-9]*/cmdline 2>/dev/null); do
    [ $file = /proc/$$/cmdline ] || [ ! -e $file ] || tr '\\0' ' ' < $file
done
"""
_TIDY_S = 10.0


@dataclass
class _Held:
    """A sandbox that runs, what its backend enforces, and how to end both."""

    sandbox: AnySandbox
    capabilities: Mapping[str, bool]
    end: asyncio.Event
    host: asyncio.Task[None]


class SharedSandboxes:
    """Sandboxes that cases use one after another, one for each kind and spec.

    All run in one event loop of their own, which stands still between the cases. A case finds its sandbox without files
    in its writable folders, without shells and without programs. It may not end the sandbox, keep named shells open or
    leave programs running: such a case fails with that reason. After a failed case, the next one gets a new sandbox.
    """

    def __init__(self) -> None:
        self._loop = asyncio.Runner()
        self._held: dict[str, _Held] = {}

    def run(self, kind: Kind, main: Callable[[AnySandbox], Awaitable[object]], **fields: object) -> None:
        """Run a case in the sandbox of this kind whose spec has `fields`; it has 90 s."""
        self._loop.run(self._run(kind, main, fields))

    def capabilities(self, kind: Kind, **fields: object) -> Mapping[str, bool]:
        """Return what the backend of that sandbox enforces."""

        async def main() -> Mapping[str, bool]:
            return (await self._get(kind, fields)).capabilities

        return self._loop.run(main())

    def close(self) -> None:
        """Stop all of them."""

        async def main() -> None:
            for key in list(self._held):
                await self._drop(key)

        try:
            self._loop.run(main())
        finally:
            self._loop.close()

    async def _run(
        self, kind: Kind, main: Callable[[AnySandbox], Awaitable[object]], fields: Mapping[str, object]
    ) -> None:
        held = await self._get(kind, fields)
        try:
            with anyio.fail_after(90):
                await main(held.sandbox)
            try:
                with anyio.fail_after(_TIDY_S):
                    await _tidy(held)
            except Exception as error:
                pytest.fail(f"the case damaged its shared sandbox, use one of its own: {error!r}", pytrace=False)
        except BaseException:
            await self._drop(_key(kind, fields))
            raise

    async def _get(self, kind: Kind, fields: Mapping[str, object]) -> _Held:
        key = _key(kind, fields)
        if key in self._held:
            try:
                await self._held[key].sandbox.probe(_TIDY_S)
            except EnvkitError:  # it ended between two cases
                await self._drop(key)
        if key not in self._held:
            self._held[key] = await _start(kind, fields)
        return self._held[key]

    async def _drop(self, key: str) -> None:
        held = self._held.pop(key)
        held.end.set()
        await held.host


async def sh(sandbox: Sandbox, command: str, user: SandboxUser = "agent") -> str:
    """Return the output of a line of shell, which must succeed."""
    result = await sandbox.exec(["sh", "-c", command], user=user, timeout_s=60)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@dataclass(frozen=True)
class Shared:
    """The shared sandbox of one kind, as a case uses it."""

    sandboxes: SharedSandboxes
    kind: Kind

    def run(self, main: Callable[[AnySandbox], Awaitable[object]], **fields: object) -> None:
        """Run `main` in the sandbox whose spec has `fields`; see `SharedSandboxes`."""
        self.sandboxes.run(self.kind, main, **fields)

    def has(self, name: str) -> bool:
        """Whether the backend enforces `name`; see `envkit.protocols.SandboxBackend.capabilities`."""
        return self.sandboxes.capabilities(self.kind)[name]

    def require(self, name: str) -> None:
        """Skip the case where the backend does not enforce `name`."""
        if not self.has(name):
            pytest.skip(f"{self.kind.name}: {name} is not enforced")


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[SharedSandboxes]:
    """The shared sandboxes of a module; each starts with the first case that asks for it."""
    made = SharedSandboxes()
    yield made
    made.close()


def _key(kind: Kind, fields: Mapping[str, object]) -> str:
    return f"{kind.name} {sorted(fields.items())}"


async def _start(kind: Kind, fields: Mapping[str, object]) -> _Held:
    """Start a sandbox in a task of its own: what a backend opens must be closed by the task that opened it."""
    ready: asyncio.Future[tuple[AnySandbox, Mapping[str, bool]]] = asyncio.get_running_loop().create_future()
    end = asyncio.Event()

    async def host() -> None:
        backend: Backend
        try:
            async with kind.backend() as backend:
                ready.set_result((await backend.start(kind.spec(**fields)), backend.capabilities()))
                await end.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    task = asyncio.create_task(host())  # noqa: TID251 - it outlives the case that starts it
    return _Held(*await ready, end, task)


async def _tidy(held: _Held) -> None:
    """Close the shells, remove all files, and require that no program runs."""
    sandbox = held.sandbox
    users: tuple[SandboxUser, ...] = ("root", "grader", "agent") if held.capabilities["uid"] else ("grader", "agent")
    folders = f"{sandbox.work} {sandbox.grader_home} $ENVKIT_SOCKETS"
    if held.capabilities["isolation"]:
        folders += " /tmp /dev/shm"
    for user in users:
        await sandbox.shell(user=user).close()
        if user == "root":  # it has no files, and may not remove those of others
            continue
        # The agent, who comes last, sees all files but those in the grader's home.
        empty = _EMPTY.format(which="" if user == "agent" else "-user $(id -u)", others=_OTHERS)
        left = await sandbox.exec(["sh", "-c", f"set -- {folders}\n{empty}"], cwd="/", user=user, timeout_s=_TIDY_S)
        assert (left.stdout, left.stderr) == ("", "")
    if held.capabilities["isolation"]:
        programs = ""
        try:
            with anyio.fail_after(_TIDY_S / 2):
                while programs := (await sandbox.exec(["sh", "-c", _PROGRAMS], timeout_s=_TIDY_S)).stdout:  # noqa: ASYNC110
                    await anyio.sleep(0.02)  # those that were killed take a moment to go
        except TimeoutError:
            raise AssertionError(f"programs that still run: {programs}") from None
