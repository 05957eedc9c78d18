"""The tools for work in a sandbox, in real sandboxes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from envkit.environments.tools import ToolEnv, cut_middle, format_result
from envkit.http.client.sandbox_client import SandboxClient
from envkit.sandbox import LocalBackend, Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.process.backend import ProcessBackend
from envkit.types import ExecResult, Options, SandboxSpec
from tests.http.remote_sandboxes import by_client

if TYPE_CHECKING:
    from envkit.protocols import SandboxPool

Use = Callable[..., Awaitable[str]]


class Work(ToolEnv):
    command_timeout_s = 20.0
    spec = SandboxSpec(memory_mib=256)

    async def start(self, seed: int, options: Options) -> str:
        await self.sandbox.write("poem.txt", b"roses\nviolets\nroses again\n", mode=0o755)
        return "work"


def used(main: Callable[[ToolEnv, Use], Awaitable[None]]) -> None:
    """Run `main` with an environment, and a function that calls one of its tools and returns the observation."""

    async def run() -> None:
        async with LocalBackend() as backend, Pool([Node("here", backend, Capacity(memory_mib=2048))]) as pool:
            env = Work(sandboxes=pool)
            await env.reset(seed=1, options={})

            async def use(name: str, **arguments: object) -> str:
                return (await env.step(json.dumps({"name": name, "arguments": arguments}))).observation.text

            try:
                await main(env, use)
            finally:
                await env.close()

    anyio.run(run)


@pytest.mark.bwrap
def test_the_shell_keeps_its_folder_and_variables_and_reports_the_exit_code() -> None:
    async def main(env: ToolEnv, use: Use) -> None:
        assert await use("bash", command="mkdir a && cd a && x=7") == "[exit code 0]"
        assert await use("bash", command="pwd; echo $x; echo oops >&2; (exit 3)") == (
            "/workspace/a\n7\noops\n[exit code 3]"
        )
        assert (await use("bash", command="exit 0")).endswith(
            "\n[the shell has ended; the next command starts a new one, without its folder and variables]"
        )
        assert await use("bash", command="pwd\0") == "Error: a shell command cannot contain NUL"

    used(main)


@pytest.mark.bwrap
def test_a_viewer_numbers_the_lines_of_a_range() -> None:
    async def main(env: ToolEnv, use: Use) -> None:
        assert await use("view_file", path="poem.txt", first_line=2) == (
            "2  violets\n3  roses again\n[lines 2 to 3 of 3]"
        )
        assert await use("view_file", path="poem.txt", last_line=1) == "1  roses\n[lines 1 to 1 of 3]"
        assert await use("view_file", path="poem.txt", first_line=4) == (
            "Error: there are no lines 4 to 3; /workspace/poem.txt has 3 lines"
        )
        assert (await use("view_file", path="prose.txt")).startswith("Error: ")
        await env.sandbox.write("odd.txt", "a\x0cb\u2028c\n\xff".encode("latin-1", "replace"))
        assert (
            await use("view_file", path="odd.txt") == "1  a\x0cb?c\n2  \N{REPLACEMENT CHARACTER}\n[lines 1 to 2 of 2]"
        )
        await use("bash", command="head -c 5000000 /dev/zero > big; : > empty; yes '' | head -n 20000 > lines")
        assert (await use("view_file", path="big")).startswith("Error: ")
        assert await use("view_file", path="empty") == "/workspace/empty is empty"
        assert (await use("view_file", path="lines", first_line=7)).endswith("[lines 7 to 5006 of 20000]")

    used(main)


@pytest.mark.bwrap
def test_an_editor_replaces_a_text_that_occurs_once_keeps_the_mode_and_creates_files() -> None:
    async def main(env: ToolEnv, use: Use) -> None:
        assert await use("edit_file", path="poem.txt", old="violets\n", new="tulips\n") == (
            "edited /workspace/poem.txt at line 2"
        )
        assert await use("bash", command="cat poem.txt; stat -c %a poem.txt") == (
            "roses\ntulips\nroses again\n755\n[exit code 0]"
        )
        assert await use("edit_file", path="poem.txt", old="roses", new="") == (
            "Error: the old text occurs 2 times in /workspace/poem.txt, and must occur once; include more of the lines "
            "around it"
        )
        assert await use("edit_file", path="poem.txt", old="lilies", new="") == (
            "Error: the old text occurs 0 times in /workspace/poem.txt, and must occur once; check its white space"
        )
        assert await use("edit_file", path="poem.txt", old="", new="a") == (
            "Error: /workspace/poem.txt exists; the old text must not be empty"
        )
        assert await use("edit_file", path="b/new.txt", old="", new="hi") == "created /workspace/b/new.txt"
        assert await use("bash", command="cat b/new.txt") == "hi\n[exit code 0]"
        assert (await use("edit_file", path="/etc/new.txt", old="", new="hi")).startswith("Error: ")

    used(main)


@pytest.mark.bwrap
def test_shell_viewer_and_editor_agree_about_paths_and_follow_links() -> None:
    async def main(env: ToolEnv, use: Use) -> None:
        await use("bash", command="mkdir -p a/b; cd a; printf 'x = 1\r\ny = 2\r\n' > m.py; ln -s ../m.py b/link.py")
        await use("bash", command="chmod 4750 m.py; ln -s loop loop; ln -s m.py ~/home.py; cd b")
        assert await use("view_file", path="link.py", last_line=1) == "1  x = 1\r\n[lines 1 to 1 of 2]"
        assert await use("edit_file", path="link.py", old="x = 1\ny = 2", new="") == (
            "Error: the old text occurs 0 times in /workspace/a/m.py, and must occur once; "
            "the lines of the file end with CR LF, \\r\\n"
        )
        assert await use("edit_file", path="link.py", old="x = 1\r\ny", new="z\r\ny") == (
            "edited /workspace/a/m.py at line 1"
        )
        assert await use("bash", command="stat -c '%a %F' ../m.py link.py; head -n 1 ../m.py") == (
            "750 regular file\n777 symbolic link\nz\r\n[exit code 0]"
        )
        assert await use("edit_file", path="c/new file.py", old="", new="1") == ("created /workspace/a/b/c/new file.py")
        assert await use("edit_file", path="~/t.py", old="", new="2") == f"created {await home(use)}/t.py"
        assert (await use("view_file", path="../loop")).startswith("Error: ")
        for path in ("a\0b", "", "x" * 100_000):
            assert (await use("view_file", path=path)).startswith("Error: ")
            assert (await use("edit_file", path=path, old="", new="3")).startswith("Error: ")

    used(main)


def test_what_the_client_of_a_server_refuses_is_a_result() -> None:
    async def main(client: SandboxClient, _: Pool) -> None:
        env = Work(sandboxes=cast("SandboxPool", client))  # no `events`
        env.spec = SandboxSpec()  # of a backend without limits
        await env.reset(seed=1, options={})

        async def use(name: str, **arguments: object) -> str:
            return (await env.step(json.dumps({"name": name, "arguments": arguments}))).observation.text

        for path in ("a\0b", "/a\0b"):
            assert (await use("view_file", path=path)).startswith("Error: ")
            assert (await use("edit_file", path=path, old="", new="3")).startswith("Error: ")
        assert await use("bash", command="chmod 4755 poem.txt") == "[exit code 0]"
        assert (await use("edit_file", path="poem.txt", old="violets", new="tulips")).startswith("edited ")
        await env.close()

    by_client(main, ProcessBackend())


async def home(use: Use) -> str:
    return (await use("bash", command="echo ~")).partition("\n")[0]


@pytest.mark.bwrap
def test_a_submission_leaves_out_what_cannot_be_read_as_a_file() -> None:
    async def main(env: ToolEnv, use: Use) -> None:
        await use(
            "bash", command="mkdir folder; mkfifo pipe; ln -s /dev/zero zeros; ln -s poem.txt link; chmod 0 poem.txt"
        )
        await use("bash", command="echo a > a.txt")
        assert (await env.submission("folder", "pipe", "zeros", "link", "absent", "a.txt")).files == {"a.txt": b"a\n"}

    used(main)


def test_a_result_says_what_was_dropped_and_what_was_killed() -> None:
    result = ExecResult(-9, b"tail", truncated_bytes=12_345, is_out_of_memory=True)
    assert format_result(result, 1.0).splitlines() == [
        "... 12,345 bytes of output dropped ...",
        "tail",
        "[exit code -9]",
        "[a process was killed because the memory is full]",
    ]


def test_a_cut_keeps_both_ends_and_says_how_much_is_missing() -> None:
    assert cut_middle("a" * 10, 10) == "a" * 10
    assert cut_middle("a" * 6000 + "b" * 6000, 1001) == f"{'a' * 500}\n... 10,999 characters cut ...\n{'b' * 501}"
