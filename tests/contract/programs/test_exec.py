"""One promise for every kind of sandbox: what running a program gives, and that nothing of it is left."""

from __future__ import annotations

import signal

import anyio
import pytest

from envkit import clock
from envkit.errors import UnsupportedError
from envkit.protocols import Sandbox
from envkit.types import ExecResult
from tests.contract.boxes import SOON_S, Kind, run, sleepers, until

ALL_BYTES = bytes(range(256))


async def sh(box: Sandbox, command: str, *, timeout_s: float = 20) -> ExecResult:
    return await box.exec(["sh", "-c", command], timeout_s=timeout_s)


def test_output_and_exit_code_are_the_programs(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            result = await sh(box, "echo out; echo err >&2; exit 5")
            assert (result.exit_code, result.stdout, result.stderr) == (5, "out\n", "err\n")
            assert (result.timed_out, result.truncated_bytes, result.is_out_of_memory) == (False, 0, False)
            assert 0 < result.duration_s < SOON_S

    run(main)


def test_a_signal_is_a_negative_exit_code(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGABRT):
                assert (await sh(box, f"kill -{number} $$")).exit_code == -number

    run(main)


def test_a_program_that_cannot_be_started_is_a_result(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            missing = await box.exec(["no-such-program", "x"], timeout_s=20)
            assert missing.exit_code == 127
            assert "no-such-program: No such file or directory" in missing.stderr
            assert (await box.exec(["/etc/hosts"], timeout_s=20)).exit_code in (126, 127)
            assert (await box.exec(["/tmp"], timeout_s=20)).exit_code == 126
            assert (await box.exec(["true"], cwd="/no/such/folder", timeout_s=20)).exit_code in (126, 127)
            assert (await box.exec(["true"], timeout_s=20)).exit_code == 0

    run(main)


def test_every_byte_passes_both_ways_as_it_is(kind: Kind) -> None:
    content = ALL_BYTES * 3000 + b"no line end\r"

    async def main() -> None:
        async with kind.box() as box:
            result = await box.exec(["sh", "-c", "tee /dev/stderr"], stdin=content, timeout_s=20)
            assert result.stdout_bytes == content
            assert result.stderr_bytes == content

    run(main)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"], ids=["bare", "LF", "CRLF"])
def test_a_line_of_ten_megabytes_passes(kind: Kind, end: str) -> None:
    content = b"x" * 10_000_000 + end.encode()

    async def main() -> None:
        async with kind.box() as box:
            result = await box.exec(["cat"], stdin=content, timeout_s=60, max_output_bytes=11_000_000)
            assert result.stdout_bytes == content
            assert result.truncated_bytes == 0

    run(main)


def test_of_too_much_output_the_end_is_kept_and_the_rest_is_counted(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            flood = "head -c 3000000 /dev/zero | tr '\\0' x; echo the end; echo err >&2"
            result = await sh(box, flood)
            assert result.stdout_bytes == b"x" * ((1 << 20) - 8) + b"the end\n"
            assert result.truncated_bytes == 3_000_008 - (1 << 20)
            assert result.stderr == "err\n"
            least = await box.exec(["sh", "-c", "printf 12345; printf 678 >&2"], timeout_s=20, max_output_bytes=2)
            assert (least.stdout, least.stderr, least.truncated_bytes) == ("45", "78", 4)
            none = await box.exec(["echo", "x"], timeout_s=20, max_output_bytes=0)
            assert (none.exit_code, none.stdout, none.truncated_bytes) == (0, "", 2)

    run(main)


def test_output_that_nobody_could_keep_is_drained(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            result = await sh(box, "head -c 400000000 /dev/zero", timeout_s=60)
            assert result.exit_code == 0
            assert result.truncated_bytes == 400_000_000 - (1 << 20)

    run(main)


def test_unicode_passes_and_what_cannot_be_decoded_is_replaced(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            words = ["\N{SNOWMAN}", "h\u00e9llo", "\U0001f600"]
            result = await box.exec(["printf", "%s.", *words], timeout_s=20)
            assert result.stdout == "".join(f"{word}." for word in words)
            broken = await sh(box, "printf 'a\\377b'")
            assert (broken.stdout, broken.stdout_bytes) == ("a\N{REPLACEMENT CHARACTER}b", b"a\xffb")

    run(main)


def test_arguments_arrive_as_they_are(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            arguments = ["two words", "", "line\nend", "-n", "$HOME", "'\"\\", "\udcff", "x" * 100_000]
            result = await box.exec(["printf", "%s\\0", *arguments], timeout_s=20)
            assert result.stdout_bytes == b"".join(
                argument.encode(errors="surrogateescape") + b"\0" for argument in arguments
            )

    run(main)


def test_arguments_and_variables_with_nul_and_those_that_are_too_large_are_refused(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            with pytest.raises(ValueError, match="holds NUL"):
                await box.exec(["echo", "a\0b"], timeout_s=20)
            with pytest.raises(ValueError, match="holds NUL"):
                await box.exec(["echo"], env={"A": "b\0"}, timeout_s=20)
            with pytest.raises(ValueError, match="more than 1048576 bytes"):
                await box.exec(["echo", "x" * (1 << 20)], timeout_s=20)
            assert (await sh(box, "echo on")).stdout == "on\n"

    run(main)


def test_a_program_has_the_boxs_environment_and_its_own_and_none_of_ours(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVKIT_TEST_SECRET", "open-sesame")

    async def main() -> None:
        async with kind.box(env={"COLOUR": "dark blue\n", "SIZE": "5"}) as box:
            shown = (await box.exec(["env", "-0"], env={"SIZE": "7"}, timeout_s=20)).stdout
            found = dict(setting.split("=", 1) for setting in shown.split("\0")[:-1])
            assert (found["COLOUR"], found["SIZE"], found["HOME"]) == ("dark blue\n", "7", box.work)
            assert set(found) - {"TMPDIR"} == {"ENVKIT_SOCKETS", "HOME", "PATH", "LANG", "COLOUR", "SIZE"}

    run(main)


def test_a_program_starts_in_the_boxs_folder_or_where_it_is_told(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            assert (await box.exec(["pwd"], timeout_s=20)).stdout == f"{box.work}\n"
            assert (await box.exec(["pwd"], cwd="/usr", timeout_s=20)).stdout == "/usr\n"
            assert (await sh(box, "mkdir -p inner && touch inner/x && ls inner")).stdout == "x\n"

    run(main)


def test_standard_input_is_empty_and_nothing_else_is_open(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            assert (await box.exec(["cat"], timeout_s=20)).stdout == ""
            assert (await box.exec(["ls", "/proc/self/fd"], timeout_s=20)).stdout.split() == ["0", "1", "2", "3"]

    run(main)


def test_input_that_is_not_read_does_not_hold_the_answer_back(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            result = await box.exec(["echo", "deaf"], stdin=b"x" * 5_000_000, timeout_s=20)
            assert (result.exit_code, result.stdout) == (0, "deaf\n")

    run(main)


def test_a_slow_program_is_ended_with_everything_that_it_started_and_what_it_said_is_kept(
    kind: Kind, marker: str
) -> None:
    async def main() -> None:
        async with kind.box() as box:
            stubborn = f"trap '' TERM HUP INT; echo begun; (setsid sleep {marker} &) & sleep {marker}"
            began = clock.now()
            result = await sh(box, stubborn, timeout_s=2)
            assert (result.exit_code, result.timed_out, result.stdout) == (None, True, "begun\n")
            assert 2 <= result.duration_s < 4.5
            assert clock.now() - began < 2 + SOON_S
            assert sleepers(marker) == []
            assert (await sh(box, "echo on")).stdout == "on\n"

    run(main)


def test_what_a_program_leaves_behind_is_ended_and_does_not_hold_the_answer_back(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.box() as box:
            result = await sh(box, f"setsid sleep {marker} & (sleep {marker} &); echo done")
            assert (result.exit_code, result.stdout) == (0, "done\n")
            assert result.duration_s < SOON_S
            assert sleepers(marker) == []

    run(main)


def test_a_cancelled_program_is_ended(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.box() as box:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: box.exec(["sh", "-c", f"sleep {marker} & sleep {marker}"], timeout_s=100))
                await until(lambda: len(sleepers(marker)) == 2)
                tasks.cancel_scope.cancel()
            assert sleepers(marker) == []
            assert (await sh(box, "echo on")).stdout == "on\n"

    run(main)


def test_a_program_cancelled_at_any_moment_disturbs_nobody(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.box() as box:
            for moment_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016):
                with anyio.move_on_after(moment_s):
                    await box.exec(["sleep", marker], stdin=b"x" * 100_000, timeout_s=100)
            assert sleepers(marker) == []
            assert (await sh(box, "echo on")).stdout == "on\n"

    run(main)


def test_sixteen_programs_at_once_each_get_their_own_output(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box:
            outputs: dict[int, list[str]] = {number: [] for number in range(16)}

            async def one(number: int) -> None:
                for _ in range(4):
                    result = await box.exec(
                        ["sh", "-c", "cat; sleep 0.05; echo $$"], stdin=b"%d " % number, timeout_s=60
                    )
                    outputs[number].append(result.stdout.split()[0])

            async with anyio.create_task_group() as tasks:
                for number in range(16):
                    tasks.start_soon(one, number)
            assert outputs == {number: [str(number)] * 4 for number in range(16)}

    run(main)


def test_programs_run_side_by_side(kind: Kind) -> None:
    async def main() -> None:
        async with kind.box() as box, anyio.create_task_group() as tasks:
            for mine, other in (("a", "b"), ("b", "a")):  # each waits for the other's sign
                tasks.start_soon(sh, box, f"touch {mine}; until [ -e {other} ]; do sleep 0.01; done")

    run(main)


def test_users_are_who_they_should_be(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            box = await backend.start(kind.spec())
            if backend.capabilities()["uid"]:
                for user, uid in (("agent", "1000"), ("grader", "1001"), ("root", "0")):
                    assert (await box.exec(["id", "-u"], user=user, timeout_s=20)).stdout == f"{uid}\n"  # type: ignore[arg-type]
            else:
                with pytest.raises(UnsupportedError):
                    await box.exec(["id", "-u"], user="root", timeout_s=20)

    run(main)


def test_a_grader_reads_what_the_agent_wrote_and_not_the_other_way_round(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            if not backend.capabilities()["uid"]:
                pytest.skip("one user is all that there is")
            box = await backend.start(kind.spec())
            await box.write("answer", b"42")
            wait = "until [ -e /tmp/{} ]; do sleep 0.01; done".format
            grade = f"umask 077; cat /workspace/answer; echo secret > /tmp/grade; {wait('peeked')}"
            attack = "cat /tmp/grade; echo x > /tmp/grade; pkill -u 1001; kill -9 -1; true"
            async with anyio.create_task_group() as tasks:

                async def grader() -> None:
                    result = await box.exec(["sh", "-c", grade], user="grader", timeout_s=20)
                    assert (result.exit_code, result.stdout) == (0, "42")

                tasks.start_soon(grader)
                peek = await sh(box, f"{wait('grade')}; {attack}")
                await box.write("/tmp/peeked", b"")
                assert "secret" not in peek.stdout
            assert (await box.exec(["cat", "/tmp/grade"], user="grader", timeout_s=20)).stdout == "secret\n"

    run(main)


def test_who_uses_too_much_memory_is_ended_and_the_result_says_so(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            if not backend.capabilities()["memory"]:
                pytest.skip("memory is not bounded here")
            box = await backend.start(kind.spec(memory_mib=64))
            eat = "x = bytearray(300 << 20)\nfor at in range(0, len(x), 4096): x[at] = 1"
            result = await box.exec([kind.python, "-c", eat], timeout_s=60)
            assert (result.exit_code, result.is_out_of_memory) == (-signal.SIGKILL, True)
            after = await sh(box, "echo on")
            assert (after.stdout, after.is_out_of_memory) == ("on\n", False)

    run(main)
