"""A sandbox over a scripted agent: it starts, decodes answers, and releases its host resources once."""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.errors import (
    SandboxEndedError,
    SandboxError,
    SandboxLostError,
    SandboxStartError,
    UnsupportedError,
)
from envkit.types import CauseKind
from tests.causes import cause
from tests.sandbox.agent_client.peer import HELLO, run
from tests.sandbox.sandbox_case import COMMAND, RESULT, Case, answered


@pytest.mark.parametrize("when", ["before hello", "before the first answer"])
def test_a_sandbox_that_ends_while_it_starts_reports_why_and_leaves_nothing(when: str) -> None:
    async def main() -> None:
        case = Case()
        case.cause = cause("exited with code 127: no-such-program: not found", CauseKind.EXITED)

        async def end() -> None:
            if when == "before the first answer":
                case.peer.emit(HELLO)
                await case.peer.next_frame()
            case.peer.emit_bytes(b"")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end)
            with pytest.raises(SandboxStartError) as caught:
                await case.sandbox.started(COMMAND, 5)
        assert isinstance(caught.value, SandboxEndedError) is (when == "before the first answer")
        assert (caught.value.sandbox_id, str(caught.value.cause)) == ("case-1", str(case.cause))
        assert case.done == ["asked", "killed", "forgotten"]

    run(main)


def test_a_start_that_is_lost_by_the_backend_does_not_count_as_an_end_of_the_command() -> None:
    async def main() -> None:
        case = Case()
        case.cause = cause("its streams ended", CauseKind.BACKEND_LOST)

        async def end() -> None:
            case.peer.emit(HELLO)
            await case.peer.next_frame()
            case.peer.emit_bytes(b"")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end)
            with pytest.raises(SandboxStartError, match="its streams ended") as caught:
                await case.sandbox.started(COMMAND, 5)
        assert not isinstance(caught.value, SandboxEndedError)

    run(main)


@pytest.mark.parametrize("says_hello", [False, True])
def test_a_sandbox_that_is_not_ready_in_time_is_killed(says_hello: bool) -> None:
    async def main() -> None:
        case = Case()
        if says_hello:
            case.peer.emit(HELLO)
        with pytest.raises(SandboxStartError, match="did not start: not ready after 5 s") as caught:
            await case.sandbox.started(COMMAND, 5)
        assert not isinstance(caught.value, SandboxEndedError)
        assert (clock.now(), case.done) == (5, ["killed", "forgotten"])
        assert case.peer.is_closed

    run(main)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"code": "0"}, "Expected `int | null`, got `str` - at `$.code`"),
        ({"code": 1 << 40}, "Expected `int` <= 255 - at `$.code`"),
        ({"timed_out": 1}, "Expected `bool | null`, got `int` - at `$.timed_out`"),
        ({"oom": "no"}, "Expected `bool | null`, got `str` - at `$.oom`"),
        ({"cut": -1}, "Expected `int` >= 0 - at `$.cut`"),
        ({"duration_s": -1}, "Expected `float` >= 0.0 - at `$.duration_s`"),
        ({"duration_s": True}, "Expected `float`, got `bool` - at `$.duration_s`"),
        ({"state": "go\nne"}, "Invalid enum value 'go\\nne' - at `$.state`"),
    ],
)
def test_an_invalid_result_ends_the_sandbox(wrong: dict[str, Any], message: str) -> None:
    async def main() -> None:
        case = await Case().started()
        with pytest.raises(ExceptionGroup) as caught:
            await answered(case, case.sandbox.exec(["true"], timeout_s=5), end=True, **{**RESULT, **wrong})
        (lost,) = caught.value.exceptions
        assert isinstance(lost, SandboxLostError)
        assert str(lost.cause) == f"broken frame: {message}"
        await case.sandbox.stop()
        assert case.done == ["killed", "forgotten"]

    run(main)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("unsupported", UnsupportedError),
        ("bad", SandboxError),
        ("something new", SandboxError),
    ],
)
def test_each_error_code_of_the_agent_raises_its_own_exception(code: str, kind: type[Exception]) -> None:
    async def main() -> None:
        case = await Case().started()
        with pytest.raises(ExceptionGroup) as caught:
            await answered(case, case.sandbox.read("x"), error=code, text="x: no\nway")
        (error,) = caught.value.exceptions
        assert type(error) is kind
        assert str(error) == "x: no way"
        assert case.done == []
        await case.sandbox.stop()

    run(main)


def test_commands_queued_in_a_shell_do_not_time_out_while_they_wait() -> None:
    async def main() -> None:
        case = await Case().started()
        shell = case.sandbox.shell()
        assert case.sandbox.shell() is shell
        ended = []

        async def one(number: int) -> None:
            result = await shell.run(f"{number}", timeout_s=30)
            ended.append((number, result.timed_out, clock.now()))

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(one, number)
                await anyio.lowlevel.checkpoint()
            for number in range(3):
                header, _ = await case.peer.next_frame()
                assert (header["command"], header["name"]) == (f"{number}", "agent:main")
                await anyio.sleep(32)
                case.peer.emit(
                    {"id": header["id"], "end": True, **RESULT, "timed_out": True, "code": None, "state": "kept"}
                )
        assert ended == [(0, True, 32), (1, True, 64), (2, True, 96)]
        began = clock.now()
        with pytest.raises(SandboxLostError):  # a command on an idle shell gets no extra time
            await shell.run("3", timeout_s=30)
        assert clock.now() - began == 40.5

    run(main)


def test_a_connection_that_opens_as_its_sandbox_ends_leaves_no_socket_open() -> None:
    async def main(turns: int) -> None:
        case = await Case().started()

        async def connect() -> None:
            with suppress(SandboxLostError):
                (await case.sandbox.connect("env.sock")).close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connect)
            forward = {"id": 2, "do": "forward", "socket": "/run/envkit/env.sock"}
            assert (await case.peer.next_frame())[0] == forward
            case.peer.emit({"id": 2, "of": "open"})
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            await case.sandbox.stop()

    for turns in range(6):
        run(partial(main, turns))
    gc.collect()  # a socket that is still open warns now
