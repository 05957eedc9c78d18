"""Shared sandboxes: what a case leaves in one is not seen by the next, and who damages one fails itself."""

from __future__ import annotations

import pytest

from tests.contract.kinds import OF_HOST_IN_TMP, PARAMS, Kind
from tests.contract.shared import AnySandbox, SharedSandboxes

pytestmark = pytest.mark.parametrize("kind", PARAMS[:1], indirect=True)
DAMAGED = "the case damaged its shared sandbox"


async def require_new(sandbox: AnySandbox) -> None:
    found = await sandbox.exec(["sh", "-c", "ls -A . /tmp /dev/shm; echo $X"], timeout_s=20)
    assert found.stdout.split() == [".:", "/dev/shm:", "/tmp:", *OF_HOST_IN_TMP]
    assert (await sandbox.shell().run("echo ${X-none}", timeout_s=20)).stdout == "none\n"


def test_files_and_the_state_of_shells_are_gone_for_the_next_case(kind: Kind, sandboxes: SharedSandboxes) -> None:
    ids = []

    async def leave(sandbox: AnySandbox) -> None:
        ids.append(sandbox.id)
        await sandbox.shell().run("X=1; mkdir -p a/b; echo x > a/b/c; chmod 0 a/b a; ln -s /etc a-link", timeout_s=20)
        await sandbox.shell(user="grader").run("echo x > ~/key; echo x > /tmp/key; echo x > /dev/shm/key", timeout_s=20)

    async def look(sandbox: AnySandbox) -> None:
        ids.append(sandbox.id)
        await require_new(sandbox)
        assert (await sandbox.exec(["ls", "-A", sandbox.grader_home], timeout_s=20, user="grader")).stdout == ""

    sandboxes.run(kind, leave)
    sandboxes.run(kind, look)
    assert ids[0] == ids[1]


def test_a_case_that_leaves_a_program_fails_with_its_name(kind: Kind, sandboxes: SharedSandboxes, marker: str) -> None:
    async def leave(sandbox: AnySandbox) -> None:
        await sandbox.shell("other").run(f"sleep {marker} &", timeout_s=20)

    with pytest.raises(pytest.fail.Exception, match=f"{DAMAGED}.*sleep {marker}"):
        sandboxes.run(kind, leave)
    sandboxes.run(kind, require_new)


def test_after_a_case_that_failed_the_next_gets_another(kind: Kind, sandboxes: SharedSandboxes) -> None:
    async def fail(sandbox: AnySandbox) -> None:
        await sandbox.write("left", b"")
        raise LookupError

    with pytest.raises(LookupError):
        sandboxes.run(kind, fail)
    sandboxes.run(kind, require_new)
