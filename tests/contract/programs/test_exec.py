"""One promise for every kind of sandbox: what running a program gives, and that nothing of it is left."""

from __future__ import annotations

import signal

import anyio
import pytest

from envkit import clock
from envkit.errors import UnsupportedError
from envkit.protocols import Sandbox
from envkit.types import ExecResult, SandboxUser
from tests.contract.kinds import ALSO_REMOTE, SOON_S, Kind, run, sleepers, until
from tests.contract.shared import AnySandbox, Shared

ALL_BYTES = bytes(range(256))


async def sh(sandbox: Sandbox, command: str, *, timeout_s: float = 20, user: SandboxUser = "agent") -> ExecResult:
    return await sandbox.exec(["sh", "-c", command], timeout_s=timeout_s, user=user)


@ALSO_REMOTE
def test_output_and_exit_code_are_the_programs(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        result = await sh(sandbox, "echo out; echo err >&2; exit 5")
        assert (result.exit_code, result.stdout, result.stderr) == (5, "out\n", "err\n")
        assert (result.timed_out, result.truncated_bytes, result.is_out_of_memory) == (False, 0, False)
        assert 0 < result.duration_s < SOON_S

    shared.run(main)


def test_a_signal_is_a_negative_exit_code(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGABRT):
            assert (await sh(sandbox, f"kill -{number} $$")).exit_code == -number

    shared.run(main)


def test_a_program_that_cannot_be_started_is_a_result(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        missing = await sandbox.exec(["no-such-program", "x"], timeout_s=20)
        assert missing.exit_code == 127
        assert "no-such-program: No such file or directory" in missing.stderr
        assert (await sandbox.exec(["/etc/hosts"], timeout_s=20)).exit_code in (126, 127)
        assert (await sandbox.exec(["/tmp"], timeout_s=20)).exit_code == 126
        assert (await sandbox.exec(["true"], cwd="/no/such/folder", timeout_s=20)).exit_code in (126, 127)
        assert (await sandbox.exec(["true"], timeout_s=20)).exit_code == 0

    shared.run(main)


@ALSO_REMOTE
def test_every_byte_passes_both_ways_as_it_is(shared: Shared) -> None:
    content = ALL_BYTES * 3000 + b"no line end\r"

    async def main(sandbox: AnySandbox) -> None:
        result = await sandbox.exec(["sh", "-c", "tee /dev/stderr"], stdin=content, timeout_s=20)
        assert result.stdout_bytes == content
        assert result.stderr_bytes == content

    shared.run(main)


@ALSO_REMOTE
def test_of_too_much_output_the_end_is_kept_and_the_rest_is_counted(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        flood = "head -c 3000000 /dev/zero | tr '\\0' x; echo the end; echo err >&2"
        result = await sh(sandbox, flood)
        assert result.stdout_bytes == b"x" * ((1 << 20) - 8) + b"the end\n"
        assert result.truncated_bytes == 3_000_008 - (1 << 20)
        assert result.stderr == "err\n"
        least = await sandbox.exec(["sh", "-c", "printf 12345; printf 678 >&2"], timeout_s=20, max_output_bytes=2)
        assert (least.stdout, least.stderr, least.truncated_bytes) == ("45", "78", 4)
        none = await sandbox.exec(["echo", "x"], timeout_s=20, max_output_bytes=0)
        assert (none.exit_code, none.stdout, none.truncated_bytes) == (0, "", 2)

    shared.run(main)


def test_arguments_arrive_as_they_are(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        arguments = ["two words", "", "line\nend", "-n", "$HOME", "'\"\\", "\udcff", "x" * 100_000]
        result = await sandbox.exec(["printf", "%s\\0", *arguments], timeout_s=20)
        assert result.stdout_bytes == b"".join(
            argument.encode(errors="surrogateescape") + b"\0" for argument in arguments
        )

    shared.run(main)


def test_arguments_and_variables_with_nul_and_those_that_are_too_large_are_refused(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        with pytest.raises(ValueError, match="contains a NUL character"):
            await sandbox.exec(["echo", "a\0b"], timeout_s=20)
        with pytest.raises(ValueError, match="contains a NUL character"):
            await sandbox.exec(["echo"], env={"A": "b\0"}, timeout_s=20)
        with pytest.raises(ValueError, match="more than 1048576 bytes"):
            await sandbox.exec(["echo", "x" * (1 << 20)], timeout_s=20)
        assert (await sh(sandbox, "echo on")).stdout == "on\n"

    shared.run(main)


def test_a_program_has_the_sandboxs_environment_and_its_own_and_none_of_ours(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVKIT_TEST_SECRET", "open-sesame")

    async def main() -> None:
        async with kind.sandbox(env={"COLOUR": "dark blue\n", "SIZE": "5"}) as sandbox:
            shown = (await sandbox.exec(["env", "-0"], env={"SIZE": "7"}, timeout_s=20)).stdout
            found = dict(setting.split("=", 1) for setting in shown.split("\0")[:-1])
            assert (found["COLOUR"], found["SIZE"], found["HOME"]) == ("dark blue\n", "7", sandbox.work)
            assert set(found) - {"TMPDIR", "ENVKIT_WORKDIR"} == {
                "ENVKIT_SOCKETS",
                "HOME",
                "PATH",
                "LANG",
                "COLOUR",
                "SIZE",
            }

    run(main)


def test_a_program_starts_in_the_workspace_or_in_the_given_folder(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        assert (await sandbox.exec(["pwd"], timeout_s=20)).stdout == f"{sandbox.work}\n"
        assert (await sandbox.exec(["pwd"], cwd="/usr", timeout_s=20)).stdout == "/usr\n"
        assert (await sh(sandbox, "mkdir -p inner && touch inner/x && ls inner")).stdout == "x\n"

    shared.run(main)


def test_standard_input_is_empty_and_nothing_else_is_open(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        assert (await sandbox.exec(["cat"], timeout_s=20)).stdout == ""
        assert (await sandbox.exec(["ls", "/proc/self/fd"], timeout_s=20)).stdout.split() == ["0", "1", "2", "3"]

    shared.run(main)


def test_input_that_is_not_read_does_not_hold_the_answer_back(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        result = await sandbox.exec(["echo", "deaf"], stdin=b"x" * 5_000_000, timeout_s=20)
        assert (result.exit_code, result.stdout) == (0, "deaf\n")

    shared.run(main)


@ALSO_REMOTE
def test_a_program_past_its_timeout_is_killed_with_its_children_and_its_output_is_kept(
    shared: Shared, marker: str
) -> None:
    async def main(sandbox: AnySandbox) -> None:
        stubborn = f"trap '' TERM HUP INT; echo begun; (setsid sleep {marker} &) & sleep {marker}"
        began = clock.now()
        result = await sh(sandbox, stubborn, timeout_s=1)
        assert (result.exit_code, result.timed_out, result.stdout) == (None, True, "begun\n")
        assert 1 <= result.duration_s < 3.5
        assert clock.now() - began < 1 + SOON_S
        assert sleepers(marker) == []
        assert (await sh(sandbox, "echo on")).stdout == "on\n"

    shared.run(main)


def test_what_a_program_leaves_behind_is_ended_and_does_not_hold_the_answer_back(shared: Shared, marker: str) -> None:
    async def main(sandbox: AnySandbox) -> None:
        result = await sh(sandbox, f"setsid sleep {marker} & (sleep {marker} &); echo done")
        assert (result.exit_code, result.stdout) == (0, "done\n")
        assert result.duration_s < SOON_S
        assert sleepers(marker) == []

    shared.run(main)


@ALSO_REMOTE
def test_a_cancelled_program_is_ended(shared: Shared, marker: str) -> None:
    async def main(sandbox: AnySandbox) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: sandbox.exec(["sh", "-c", f"sleep {marker} & sleep {marker}"], timeout_s=100))
            await until(lambda: len(sleepers(marker)) == 2)
            tasks.cancel_scope.cancel()
        assert sleepers(marker) == []
        assert (await sh(sandbox, "echo on")).stdout == "on\n"

    shared.run(main)


def test_a_program_cancelled_at_any_moment_disturbs_nobody(shared: Shared, marker: str) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for moment_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016):
            with anyio.move_on_after(moment_s):
                await sandbox.exec(["sleep", marker], stdin=b"x" * 100_000, timeout_s=100)
        assert sleepers(marker) == []
        assert (await sh(sandbox, "echo on")).stdout == "on\n"

    shared.run(main)


def test_sixteen_programs_at_once_each_get_their_own_output(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        outputs: dict[int, list[str]] = {number: [] for number in range(16)}

        async def one(number: int) -> None:
            for _ in range(4):
                result = await sandbox.exec(
                    ["sh", "-c", "cat; sleep 0.05; echo $$"], stdin=b"%d " % number, timeout_s=60
                )
                outputs[number].append(result.stdout.split()[0])

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(one, number)
        assert outputs == {number: [str(number)] * 4 for number in range(16)}

    shared.run(main)


@ALSO_REMOTE
def test_users_are_who_they_should_be(shared: Shared) -> None:
    users: dict[SandboxUser, int] = {"agent": 1000, "grader": 1001, "root": 0}
    has_users = shared.has("uid")

    async def main(sandbox: AnySandbox) -> None:
        if has_users:
            for user, uid in users.items():
                assert (await sh(sandbox, "id -u; id -g; id -G", user=user)).stdout == f"{uid}\n" * 3
        else:
            with pytest.raises(UnsupportedError):
                await sandbox.exec(["id", "-u"], user="root", timeout_s=20)

    shared.run(main)
