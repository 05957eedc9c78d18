"""What every backend promises by `envkit.protocols`, the scripted one among them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from envkit.errors import (
    MissingFileError,
    RefusedFileError,
    SandboxError,
    SandboxLostError,
    SandboxNotFoundError,
    SandboxRefusedError,
    SandboxStartError,
    TooLargeError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from envkit.protocols import Sandbox, SandboxBackend
from envkit.types import SandboxSpec
from tests.contract.kinds import KINDS, PARAMS, Kind, run
from tests.contract.shared import AnySandbox, Shared
from tests.sandbox.fake.backend import FakeBackend

ALL = pytest.mark.parametrize("name", [*PARAMS, "fake"])
CAPABILITIES = {"isolation", "network", "memory", "pids", "cpu", "disk", "uid", "seccomp"}
MISTAKES: list[dict[str, Any]] = [
    {"timeout_s": math.inf},
    {"timeout_s": math.nan},
    {"timeout_s": -1},
    {"timeout_s": "60"},
    {"max_output_bytes": -1},
    {"env": {"A=": "b"}},
    {"env": {"A": 1}},
    {"argv": ["echo", 5]},
    {"argv": "echo"},
    {"argv": []},
]
"""What cannot be asked of a program."""


@asynccontextmanager
async def opened(name: str) -> AsyncIterator[tuple[SandboxBackend, Sandbox, SandboxSpec]]:
    """Give a backend, a sandbox and the spec of it."""
    spec = SandboxSpec() if name == "fake" else KINDS[name].spec()
    async with FakeBackend() if name == "fake" else KINDS[name].backend() as backend:
        yield backend, await backend.start(spec), spec


@ALL
def test_a_program_and_a_shell_give_results(name: str) -> None:
    async def main() -> None:
        async with opened(name) as (_, sandbox, _):
            for done in (
                await sandbox.exec(["true"], timeout_s=20),
                await sandbox.exec(["true"], timeout_s=20, env={"A": "b"}, cwd="/tmp", stdin=b"c", user="agent"),
                await sandbox.shell().run("true", timeout_s=20),
                await sandbox.shell("other").run("true", timeout_s=20, max_output_bytes=10),
            ):
                assert (done.exit_code, done.stdout, done.stderr, done.timed_out) == (0, "", "", False)
            await sandbox.shell().close()
            await sandbox.shell().close()

    run(main)


@ALL
def test_files_are_kept_as_they_were_written(name: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(name) as (_, sandbox, _):
            await sandbox.write("deep/er/one", bytes(range(256)))
            assert await sandbox.read("deep/er/one") == bytes(range(256))
            with pytest.raises(MissingFileError, match="deep/er/two: "):
                await sandbox.read("deep/er/two")
            with pytest.raises(TooLargeError):
                await sandbox.read("deep/er/one", max_bytes=255)
            await sandbox.download("deep", tmp_path / "out")
            assert (tmp_path / "out" / "er" / "one").read_bytes() == bytes(range(256))
            await sandbox.upload(tmp_path / "out", "again")
            assert await sandbox.read("again/er/one") == bytes(range(256))
            with pytest.raises(UsageError):
                await sandbox.download("deep", tmp_path / "out")

    run(main)


@ALL
def test_what_a_grader_wrote_in_its_home_is_its_own_where_it_is_a_user_of_its_own(name: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(name) as (backend, sandbox, _):
            place = f"{sandbox.grader_home}/deep/key"
            await sandbox.write(place, b"42", user="grader")
            assert await sandbox.read(place, user="grader") == b"42"
            await sandbox.download(f"{sandbox.grader_home}/deep", tmp_path / "out", user="grader")
            await sandbox.upload(tmp_path / "out", f"{sandbox.grader_home}/again", user="grader")
            assert await sandbox.read(f"{sandbox.grader_home}/again/key", user="grader") == b"42"
            if not backend.capabilities()["uid"]:
                assert await sandbox.read(place) == b"42"
                return
            with pytest.raises(MissingFileError):
                await sandbox.read(place)
            with pytest.raises(MissingFileError):
                await sandbox.download(f"{sandbox.grader_home}/deep", tmp_path / "stolen")
            with pytest.raises(RefusedFileError):
                await sandbox.write(place, b"43")
            with pytest.raises(RefusedFileError):
                await sandbox.upload(tmp_path / "out", f"{sandbox.grader_home}/mine")
            with pytest.raises(UnsupportedError):
                await sandbox.read(place, user="root")  # type: ignore[arg-type]

    run(main)


@ALL
def test_a_snapshot_is_what_the_files_were(name: str) -> None:
    async def main() -> None:
        async with opened(name) as (backend, sandbox, spec):
            await sandbox.write("one", b"before")
            if name == "process":  # its files are those of the machine
                with pytest.raises(UnsupportedError):
                    await sandbox.snapshot()
                return
            kept = await sandbox.snapshot()
            await sandbox.write("one", b"after")
            branch = await backend.restore(kept, spec)
            assert (await branch.read("one"), await sandbox.read("one")) == (b"before", b"after")
            with pytest.raises(SandboxStartError):
                await backend.restore("no such", spec)
            assert await backend.snapshot_bytes(kept) >= len(b"before")
            for _ in range(2):
                await backend.remove_snapshot(kept)
            assert await backend.snapshot_bytes(kept) == 0
            assert await branch.read("one") == b"before"
            with pytest.raises((SandboxStartError, SandboxNotFoundError)):
                await backend.restore(kept, spec)
            again = await backend.restore(await sandbox.snapshot(), spec)  # its name is not that of the removed one
            assert await again.read("one") == b"after"

    run(main)


@ALL
def test_a_sandbox_answers_until_it_is_stopped_and_says_so_then(name: str) -> None:
    async def main() -> None:
        async with opened(name) as (_, sandbox, _):
            assert 0 <= await sandbox.probe(20) < 20
            with pytest.raises(UnreachableError):
                await sandbox.connect("nobody")
            await sandbox.stop()
            await sandbox.stop()
            assert str(await sandbox.wait()) == "stopped"
            for call in (
                sandbox.exec(["true"], timeout_s=5),
                sandbox.shell().run("true", timeout_s=5),
                sandbox.read("one"),
                sandbox.write("one", b""),
                sandbox.connect("nobody"),
                sandbox.probe(5),
                sandbox.snapshot(),
            ):
                with pytest.raises(SandboxLostError, match="stopped"):
                    await call

    run(main)


@ALL
def test_a_backend_says_what_it_enforces_and_starts_nothing_before_it_is_open(name: str) -> None:
    async def main() -> None:
        async with opened(name) as (backend, first, spec):
            assert set(backend.capabilities()) == CAPABILITIES
            assert (await backend.start(spec)).id != first.id
        closed = FakeBackend() if name == "fake" else KINDS[name].backend()
        with pytest.raises(SandboxError):
            await closed.start(spec)
        with pytest.raises(SandboxLostError):
            await first.exec(["true"], timeout_s=5)

    run(main)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"env": {"A=": "b"}}, "'A=' is not a valid variable name"),
        ({"env": {"": "b"}}, "'' is not a valid variable name"),
        ({"env": {"A": 3}}, "3 is not a string"),
        ({"env": {"A": "b\0"}}, r"contains a NUL character"),
        ({"command": ("sleep", 5)}, "5 is not a string"),
        ({"profile": "loose"}, "use 'strict' or 'system'"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_at_once(kind: Kind, fields: dict[str, Any], reason: str) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            with pytest.raises(SandboxRefusedError, match=reason):
                await backend.start(kind.spec(**fields))

    run(main)


def test_what_cannot_be_run_is_a_mistake_of_the_caller_and_the_sandbox_goes_on(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for asked in MISTAKES:
            order: dict[str, Any] = {"argv": ["true"], "timeout_s": 5, **asked}
            with pytest.raises(ValueError, match=r"must be|is not a (string|valid variable name)"):
                await sandbox.exec(**order)
            assert (await sandbox.exec(["true"], timeout_s=20)).exit_code == 0, asked
        with pytest.raises(UnreachableError, match="70000 is not a port"):
            await sandbox.connect(70000)

    shared.run(main)
