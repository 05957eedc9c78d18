"""A terminal that is used by typing keys and reading its screen."""

from __future__ import annotations

import re
import resource
import statistics
from collections.abc import Awaitable, Callable

import anyio
import pytest

from envkit import clock
from envkit.environments.terminal import Terminal, screen
from envkit.environments.terminal.emulator import Emulator
from envkit.environments.terminal.screen import MAX_KEYS, Screen, encode_keys
from envkit.errors import UsageError
from envkit.protocols import Sandbox

from .screens import TARGET_S, sandbox_of, turn_times

MARGIN = 10
"""Factor on the promised time on a busy machine."""
NO_PROMPT = "\n[no prompt after {} s: a program still runs, or waits for input]"
ENDED = "\n[the shell has ended; the next keys go to a new one, without its folder and variables]"
Main = Callable[[Screen, Sandbox], Awaitable[None]]


def on_screen(main: Main, kind: str = "local") -> None:
    async def run() -> None:
        with anyio.fail_after(60):
            async with sandbox_of(kind) as sandbox:
                screen = Screen()
                await main(screen, sandbox)
                await screen.close()

    clock.run(run)


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ("ls\n", b"ls\r"),
        ("C-c", b"\x03"),
        ("C-C", b"\x03"),
        ("press C-c", b"press C-c"),
        ("Up", b"\x1b[A"),
        ("M-x", b"\x1bx"),
        (["Escape", ":wq", "Enter"], b"\x1b:wq\r"),
        (["F1", "F5", "F12", "C-[", "C-@", "\u6f22"], b"\x1bOP\x1b[15~\x1b[24~\x1b\x00\xe6\xbc\xa2"),
        ([], b""),
    ],
)
def test_a_name_alone_is_a_key_and_all_else_is_text(keys: str | list[str], sent: bytes) -> None:
    assert encode_keys(keys) == sent


def test_a_tab_in_a_text_is_quoted_where_it_would_be_a_completion() -> None:
    assert encode_keys(["a\tb\n\tc", "Tab", "\t"], quotes_tabs=True) == b"a\x16\tb\r\x16\tc\t\t"
    assert encode_keys("a\tb") == b"a\tb"


def test_arrows_follow_the_mode_of_the_terminal_and_too_many_keys_are_refused() -> None:
    assert encode_keys(["Up", "Home"], application=True) == b"\x1bOA\x1b[1~"
    with pytest.raises(ValueError, match="more than 65,536 characters of keys; send them in several calls"):
        encode_keys("x" * (MAX_KEYS + 1))


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envkit.installation.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'pyte is not installed; install it: pip install "envkit\[terminal\]"'):
        Terminal(sandboxes=object(), mode="screen")  # type: ignore[arg-type]


def test_an_emulator_shows_the_last_screen_and_the_modes_of_a_full_screen_program() -> None:
    emulator = Emulator(4, 20)
    emulator.feed(b"one\r\ntwo\r\nthree\r\nfour\r\nfive\r\n\r\n")
    assert emulator.text() == "four\nfive"
    emulator.feed(b"\x1b[?1049h\x1b[H\x1b[2Jtext\x1b[?1h")
    assert (emulator.text(), emulator.is_full_screen, emulator.has_application_keys) == ("text", True, True)
    emulator.feed(b"\x1b[?1l\x1b[?1049l")
    assert (emulator.is_full_screen, emulator.has_application_keys) == (False, False)


def test_garbage_never_raises_and_leaves_a_usable_terminal() -> None:
    emulator = Emulator(4, 20)
    garbage = bytes(range(256)) + b"\x1b[1;2;3;4A\x1b[?1A\x1b[9K\x1b[\xc2\xb2A\x1b[?6h\x1b[3d\x1b#8\x1b[?3h\x1b7" * 50
    for start in range(0, len(garbage), 7):
        emulator.feed(garbage[start : start + 7])
    emulator.feed(b"\x1bc\xe6\xbc\xa2\xe5\xad\x97 e\xcc\x81 \xe2\x9a\xa0\xef\xb8\x8f end")  # a sign and its selector
    assert emulator.text() == "\u6f22\u5b57 \u00e9 \u26a0 end"


@pytest.mark.bwrap
def test_commands_return_as_soon_as_the_prompt_is_back_and_show_the_screen() -> None:
    async def main(screen: Screen, sandbox: Sandbox) -> None:
        assert await screen.type_keys("cd /tmp; x=5\n", sandbox, 200, 20) == "~$ cd /tmp; x=5\n/tmp$"
        assert await screen.type_keys("echo $x\n", sandbox, 200, 20) == "~$ cd /tmp; x=5\n/tmp$ echo $x\n5\n/tmp$"
        assert await screen.type_keys("clear\nsleep 0.2\necho 1\nsleep 0.2\necho 2\n", sandbox, 200, 20) == (
            "/tmp$ sleep 0.2\n/tmp$ echo 1\n1\n/tmp$ sleep 0.2\n/tmp$ echo 2\n2\n/tmp$"
        )
        assert await screen.type_keys("clear\ncat <<END\n\u6f22\u5b57\nEND\n", sandbox, 200, 20) == (
            "/tmp$ cat <<END\n> \u6f22\u5b57\n> END\n\u6f22\u5b57\n/tmp$"
        )
        await screen.type_keys("cat > m <<'END'\nall:\n\techo\nEND\n", sandbox, 200, 20)
        await screen.type_keys("cat > n\n", sandbox, 200, 0.5)
        await screen.type_keys(["\tx\n", "C-d"], sandbox, 200, 20)
        assert (await screen.type_keys("clear; cat -A m n\n", sandbox, 200, 20)) == "all:$\n^Iecho$\n^Ix$\n/tmp$"
        assert (await screen.type_keys("seq 2000\n", sandbox, 200, 20)) == "\n".join(
            [*map(str, range(1962, 2001)), "/tmp$"]
        )

    on_screen(main)


@pytest.mark.bwrap
@pytest.mark.parametrize("kind", ["local", "served"])
def test_a_turn_in_a_terminal_takes_at_most_some_milliseconds_beside_the_command(kind: str) -> None:
    async def main(screen: Screen, sandbox: Sandbox) -> None:
        times = await turn_times(lambda command: screen.type_keys(f"{command}\n", sandbox, 200, 20), 30)
        assert statistics.median(times) < TARGET_S * MARGIN

    on_screen(main, kind)


@pytest.mark.bwrap
def test_a_command_that_is_only_edited_and_a_full_screen_program_need_no_prompt() -> None:
    async def main(screen: Screen, sandbox: Sandbox) -> None:
        began = clock.now()
        assert await screen.type_keys("ech", sandbox, 200, 20) == "~$ ech"
        assert await screen.type_keys(["Tab", "Left", "C-e", "a"], sandbox, 200, 20) == "~$ echo a"
        assert await screen.type_keys("\n", sandbox, 200, 20) == "~$ echo a\na\n~$"
        await sandbox.write("page", b"\x1b[?1049h\x1b[H\x1b[2J\x1b[3;3Hpage")
        assert await screen.type_keys("cat page; read -n1; printf '\\e[?1049l'\n", sandbox, 200, 20) == "\n\n  page"
        assert (await screen.type_keys("q", sandbox, 200, 20)).endswith("~$")
        assert clock.now() - began < 10
        await screen.type_keys("clear\n", sandbox, 200, 20)
        assert await screen.type_keys("read\n", sandbox, 200, 0.2) == f"~$ read{NO_PROMPT.format('0.2')}"

    on_screen(main)


@pytest.mark.bwrap
@pytest.mark.parametrize(
    ("output", "skipped"),
    [
        pytest.param("yes $'\\e#8' | tr -d '\\n' | head -c 60000", r"\d\d,\d{3}", id="slow to draw"),
        pytest.param("head -c 5000000 /dev/zero | tr '\\0' '\\e'", r"4,\d{3},\d{3}", id="many bytes"),
    ],
)
def test_hostile_output_is_drawn_for_some_seconds_and_to_some_bytes_and_the_rest_is_skipped(
    output: str, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "_MAX_DRAWING_S", 1.0)

    async def main(screen: Screen, sandbox: Sandbox) -> None:
        await screen.type_keys("true\n", sandbox, 200, 20)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, clock.now()
        text = await screen.type_keys(f"{output}\n", sandbox, 200, 30)
        assert re.match(rf"\.\.\. {skipped} bytes of output were skipped \.\.\.\n", text), text[:200]
        assert clock.now() - began < 5 * MARGIN
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
        assert (await screen.type_keys("reset\n", sandbox, 200, 20)).endswith("~$")

    on_screen(main)


@pytest.mark.bwrap
def test_keys_for_a_shell_that_has_ended_meanwhile_are_not_sent_to_another_one() -> None:
    async def main(screen: Screen, sandbox: Sandbox) -> None:
        assert (await screen.type_keys("exit\n", sandbox, 200, 20)) == f"~$ exit\nexit{ENDED}"
        await screen.type_keys("sleep 0.3; echo bye; exit\n", sandbox, 200, 0)
        await anyio.sleep(1)
        assert await screen.type_keys("rm -r important\n", sandbox, 200, 20) == (
            "~$ sleep 0.3; echo bye; exit\nbye\nexit\n"
            "[the shell had ended, so the keys were not sent; the next keys go to a new one]"
        )
        assert await screen.type_keys("echo new\n", sandbox, 200, 20) == "~$ echo new\nnew\n~$"

    on_screen(main)


@pytest.mark.bwrap
def test_calls_may_come_from_different_tasks() -> None:
    async def main(screen: Screen, sandbox: Sandbox) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(screen.type_keys, "x=1\n", sandbox, 200, 20)
        assert await screen.type_keys("echo $x\n", sandbox, 200, 20) == "~$ x=1\n~$ echo $x\n1\n~$"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(screen.close)
        assert await screen.type_keys("echo $x\n", sandbox, 200, 20) == "~$ echo $x\n\n~$"

    on_screen(main)


@pytest.mark.bwrap
@pytest.mark.parametrize("kind", ["local", "served"])
def test_receiving_can_be_cancelled_without_losing_a_byte(kind: str) -> None:
    async def main() -> None:
        script = "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); [ $((i%50)) = 0 ] && sleep 0.02; done"
        async with sandbox_of(kind) as sandbox, sandbox.program(["sh", "-c", script], timeout_s=30) as program:
            found, cancelled = b"", 0
            while True:
                piece: tuple[str, bytes] | None = None
                with anyio.move_on_after(0.0005) as scope:
                    piece = await program.receive()
                    if piece is None:
                        break
                if piece is not None:
                    found += piece[1]
                cancelled += scope.cancelled_caught
            assert cancelled > 20
            assert found == b"".join(b"%d\n" % number for number in range(3000))

    clock.run(main)
