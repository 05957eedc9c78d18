"""What every backend promises by `envkit.protocols`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from envkit.errors import (
    SandboxLostError,
    SandboxNotFoundError,
    SandboxRefusedError,
    SandboxStartError,
    UnreachableError,
    UnsupportedError,
)
from tests.contract.kinds import LOCAL, Kind, run
from tests.contract.shared import AnySandbox, Shared

MISTAKES: list[dict[str, Any]] = [
    {"timeout_s": math.inf},
    {"timeout_s": -1},
    {"timeout_s": "60"},
    {"max_output_bytes": -1},
    {"env": {"A=": "b"}},
    {"argv": ["echo", 5]},
    {"argv": []},
]
"""What cannot be asked of a program."""


def test_a_snapshot_is_what_the_files_were(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            spec = kind.spec()
            sandbox = await backend.start(spec)
            await sandbox.write("one", b"before")
            if kind.name == "process":  # its files are those of the machine
                with pytest.raises(UnsupportedError):
                    await sandbox.snapshot()
                return
            kept = await sandbox.snapshot()
            await sandbox.write("one", b"after")
            branch = await backend.restore(kept, spec)
            assert (await branch.read("one"), await sandbox.read("one")) == (b"before", b"after")
            for unknown in ("no such", "../x"):
                with pytest.raises(SandboxStartError):
                    await backend.restore(unknown, spec)
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


def test_a_sandbox_answers_until_it_is_stopped_and_says_so_then(kind: Kind) -> None:
    async def main() -> None:
        async with kind.sandbox() as sandbox:
            assert 0 < await sandbox.probe(5) < 5
            assert (await sandbox.stats())["processes"] in range(1, 6)  # and not those of the machine
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


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"env": {"A=": "b"}}, "'A=' is not a valid variable name"),
    ({"env": {"A": 3}}, "3 is not a string"),
    ({"env": {"A": "b\0"}}, r"contains a NUL character"),
    ({"command": ("sleep", 5)}, "5 is not a string"),
    ({"profile": "loose"}, "use 'strict' or 'system'"),
]
"""Fields of a spec, and why they are refused."""


def test_a_spec_that_makes_no_sense_is_refused_at_once(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            for fields, reason in NONSENSE:
                with pytest.raises(SandboxRefusedError, match=reason):
                    await backend.start(kind.spec(**fields))

    run(main)


@pytest.mark.parametrize("kind", LOCAL, indirect=True)
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
