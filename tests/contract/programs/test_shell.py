"""One promise for every kind of sandbox: a shell keeps its state, whatever its commands do to it."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.errors import SandboxLostError
from tests.contract.kinds import ALSO_REMOTE, SOON_S, Kind, run, sleepers, until
from tests.contract.shared import AnySandbox, Shared

COMMANDS = [
    ("echo a; echo b >&2; (exit 5)", 5, "a\n", "b\n"),
    ("echo a # comment", 0, "a\n", ""),
    ("printf 'no line end'", 0, "no line end", ""),
    ("cat <<'EOF' > h\na b\n$x\nEOF\ncat h\nfor i in 1 2; do echo $i; done", 0, "a b\n$x\n1\n2\n", ""),
    ("cat", 0, "", ""),
    ("printf 'a\\rb\\033[31mred\\033[0m'", 0, "a\rb\033[31mred\033[0m", ""),
    ("echo $'h\\u00e9llo \\u4f60'; echo \N{SNOWMAN}", 0, "h\u00e9llo \u4f60\n\N{SNOWMAN}\n", ""),
    (
        "echo SHELLPS1PREFIX; echo EXITCODESTART0EXITCODEEND; false",
        1,
        "SHELLPS1PREFIX\nEXITCODESTART0EXITCODEEND\n",
        "",
    ),
    ("echo on the error stream > /dev/stderr", 0, "", "on the error stream\n"),
    ("", 0, "", ""),
    ("kill -9 $(sh -c 'echo $$; kill -9 $$') 2>/dev/null; echo on", 0, "on\n", ""),
]
"""Each with its code, and what it writes to both streams."""
ENDS = [
    *("exit 3", "exec sh -c 'exit 3'", "set -e; (exit 3)", "kill -9 $$", "echo 'unclosed"),
    *("trap 'echo bye' EXIT; exit 5", "echo ${none?}"),
]


@ALSO_REMOTE
def test_folder_variables_functions_and_exit_code_stay_for_the_next_command(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        shell = sandbox.shell()
        for command in (
            "mkdir -p a/b && cd a/b",
            "X='two words'; export Y=y",
            "twice() { echo $1$1; }",
            "(exit 7)",
        ):
            await shell.run(command, timeout_s=20)
        result = await shell.run("echo $?; pwd; echo $X; sh -c 'echo $Y'; twice ha", timeout_s=20)
        assert result.stdout == f"7\n{sandbox.work}/a/b\ntwo words\ny\nhaha\n"
        assert (result.exit_code, result.is_shell_lost, result.timed_out) == (0, False, False)

    shared.run(main)


def test_a_command_gives_what_it_wrote_and_its_code(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for command, *expected in COMMANDS:
            shell = sandbox.shell()
            result = await shell.run(command, timeout_s=20)
            assert [result.exit_code, result.stdout, result.stderr] == expected, command
            assert (await shell.run("echo next", timeout_s=20)).stdout == "next\n", command
            await shell.close()

    shared.run(main)


@ALSO_REMOTE
def test_a_command_that_ends_its_shell_says_so_and_the_next_begins_in_a_new_one(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for command in ENDS:
            shell = sandbox.shell()
            await shell.run("X=1", timeout_s=20)
            result = await shell.run(command, timeout_s=20)
            assert result.exit_code not in (0, None), command
            after = await shell.run("echo ${X-new}", timeout_s=20)
            assert (after.exit_code, after.stdout) == (0, "new\n" if result.is_shell_lost else "1\n"), command
            assert result.is_shell_lost == ("unclosed" not in command), command
            await shell.close()

    shared.run(main)


def test_two_hundred_thousand_lines_and_every_byte_pass(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        shell = sandbox.shell()
        result = await shell.run("seq 1 200000", timeout_s=60, max_output_bytes=1 << 21)
        assert result.stdout_bytes == b"".join(b"%d\n" % number for number in range(1, 200_001))
        await sandbox.write("all", bytes(range(256)) * 1000)
        assert (await shell.run("cat all", timeout_s=20)).stdout_bytes == bytes(range(256)) * 1000
        cut = await shell.run("seq 1 200000", timeout_s=60, max_output_bytes=7)
        assert (cut.stdout, cut.truncated_bytes) == ("200000\n", 1_288_895 - 7)

    shared.run(main)


def test_a_slow_command_is_ended_and_the_shell_keeps_its_state_if_possible(shared: Shared, marker: str) -> None:
    async def main(sandbox: AnySandbox) -> None:
        shell = sandbox.shell()
        await shell.run("X=1; cd /usr", timeout_s=20)
        began = clock.now()
        late = await shell.run(f"echo begun; trap '' TERM; setsid sleep {marker} & sleep {marker}", timeout_s=1)
        assert clock.now() - began < 1 + SOON_S
        assert (late.exit_code, late.timed_out, late.stdout, late.is_shell_lost) == (None, True, "begun\n", False)
        assert sleepers(marker) == []
        assert (await shell.run("echo $X; pwd", timeout_s=20)).stdout == "1\n/usr\n"

    shared.run(main)


def test_a_loop_without_end_costs_the_shell_its_state_and_says_so(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        shell = sandbox.shell()
        await shell.run("X=1", timeout_s=20)
        late = await shell.run("while :; do :; done", timeout_s=0.5)
        assert (late.exit_code, late.timed_out, late.is_shell_lost) == (None, True, True)
        assert (await shell.run("echo ${X-new}", timeout_s=20)).stdout == "new\n"

    shared.run(main)


FORGERIES = {
    "as it is": "printf '%s 0\\0' ${_envkit_head:0:9} >&10",
    "by its name": "printf '%s 0\\0' ${_envkit_head:0:9} > /proc/$$/fd/10",
    "of the next script": "printf '%s 0\\0' 000000003 >&10",
    "of none": "printf '0\\0' >&10",
    "much": "head -c 200000 /dev/zero >&10",
    "the beginning of one": "printf x >&10",
}


@pytest.mark.parametrize("pause_s", [0.0, 0.4])
def test_what_a_script_says_after_forging_its_end_is_not_taken_for_the_next_ones(
    shared: Shared, pause_s: float
) -> None:
    async def main(sandbox: AnySandbox) -> None:
        async def forge(name: str) -> None:
            shell = sandbox.shell(name.replace(" ", "-"))
            await shell.run("X=1", timeout_s=20)
            script = f"echo early; {{ {FORGERIES[name]}; }} 2>/dev/null; sleep 0.2; echo stale; (exit 5)"
            await shell.run(script, timeout_s=20)
            await anyio.sleep(pause_s)
            answers = [await shell.run(f"echo hi {number}", timeout_s=20) for number in range(4)]
            for number, answer in enumerate(answers):
                expected = (-9, "") if answer.is_shell_lost else (0, f"hi {number}\n")
                assert (answer.exit_code, answer.stdout) == expected, name
            assert sum(answer.is_shell_lost for answer in answers) <= 1, name
            await shell.close()

        async with anyio.create_task_group() as tasks:
            for name in FORGERIES:
                tasks.start_soon(forge, name)

    shared.run(main)


def test_a_script_that_forges_its_end_and_goes_on_cannot_outlive_the_time_of_the_next(
    shared: Shared, marker: str
) -> None:
    async def main(sandbox: AnySandbox) -> None:
        shell = sandbox.shell()
        forged = f"printf '%s 0\\0' ${{_envkit_head:0:9}} >&10; sleep {marker}; echo stale"
        assert (await shell.run(forged, timeout_s=20)).exit_code == 0
        late = await shell.run("echo hi", timeout_s=0.5)
        assert (late.exit_code, late.timed_out, late.is_shell_lost, late.stdout) == (None, True, True, "")
        assert sleepers(marker) == []
        assert (await shell.run("echo hi", timeout_s=20)).stdout == "hi\n"

    shared.run(main)


def test_jobs_in_the_background_run_on_until_the_shell_is_closed_and_hold_nobody_back(
    shared: Shared, marker: str
) -> None:
    async def main(sandbox: AnySandbox) -> None:
        shell = sandbox.shell()
        began = clock.now()
        result = await shell.run(f"(setsid sleep {marker} &); sleep {marker} & echo started", timeout_s=20)
        assert (result.stdout, clock.now() - began < SOON_S) == ("started\n", True)
        assert (await shell.run("jobs -r | wc -l", timeout_s=20)).stdout.strip() == "1"
        await until(lambda: len(sleepers(marker)) == 2)
        await shell.close()
        assert sleepers(marker) == []
        await shell.close()
        assert (await shell.run("jobs | wc -l", timeout_s=20)).stdout.strip() == "0"

    shared.run(main)


def test_callers_of_one_shell_wait_for_each_other_in_order(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        shell = sandbox.shell()
        await shell.run("count=0", timeout_s=20)
        seen = []

        async def one(number: int) -> None:
            result = await shell.run(
                f"sleep 0.0$((RANDOM % 3)); count=$((count + 1)); echo $count {number}", timeout_s=20
            )
            seen.append(result.stdout)

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(one, number)
                await anyio.lowlevel.checkpoint()
        assert seen == [f"{number + 1} {number}\n" for number in range(16)]

    shared.run(main)


def test_shells_of_different_names_have_nothing_in_common_and_run_side_by_side(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        async def one(mine: str, other: str) -> None:
            command = f"name={mine}; touch {mine}; until [ -e {other} ]; do sleep 0.01; done"
            await sandbox.shell(mine).run(command, timeout_s=20)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "a", "b")
            tasks.start_soon(one, "b", "a")
        for name in ("a", "b"):
            assert (await sandbox.shell(name).run("echo $name", timeout_s=20)).stdout == f"{name}\n"
            await sandbox.shell(name).close()
        assert (await sandbox.shell().run("echo ${name-none}", timeout_s=20)).stdout == "none\n"

    shared.run(main)


def test_a_command_that_cannot_be_sent_is_refused_and_disturbs_nobody(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        shell = sandbox.shell()
        with pytest.raises(ValueError, match="cannot contain NUL"):
            await shell.run("echo a\0b", timeout_s=20)
        with pytest.raises(ValueError, match="more than 1048576 bytes"):
            await shell.run("#" * (1 << 20), timeout_s=20)
        long = await shell.run("#" * 500_000 + "\necho on", timeout_s=20)
        assert long.stdout == "on\n"

    shared.run(main)


def test_a_users_shell_is_the_users(shared: Shared) -> None:
    shared.require("uid")

    async def main(sandbox: AnySandbox) -> None:
        await sandbox.shell().run("X=agent", timeout_s=20)
        assert (await sandbox.shell(user="grader").run("id -u; echo ${X-none}", timeout_s=20)).stdout == "1001\nnone\n"
        await sandbox.shell(user="grader").close()
        assert (await sandbox.shell().run("id -u; echo $X", timeout_s=20)).stdout == "1000\nagent\n"

    shared.run(main)


@ALSO_REMOTE
def test_a_sandbox_that_is_stopped_ends_its_shells_with_an_error(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.sandbox() as sandbox:
            async with anyio.create_task_group() as tasks:

                async def work() -> None:
                    with pytest.raises(SandboxLostError, match="lost: stopped"):
                        await sandbox.shell().run(f"sleep {marker}", timeout_s=100)

                tasks.start_soon(work)
                await until(lambda: len(sleepers(marker)) == 1)
                await sandbox.stop()
            assert sleepers(marker) == []
            with pytest.raises(SandboxLostError, match="lost: stopped"):
                await sandbox.shell().run("true", timeout_s=1)
            with pytest.raises(SandboxLostError, match="lost: stopped"):
                await sandbox.shell().close()

    run(main)
