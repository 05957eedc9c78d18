"""Views: files and folders of the host that a sandbox is shown, read-only."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.errors import SandboxRefusedError
from tests.contract.kinds import ISOLATING, KINDS, PARAMS, REMOTE, Kind, run


@pytest.fixture
def levels(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    folder = tmp_path / "levels"
    folder.mkdir()
    (folder / "one").write_text("floor 1\n")
    return folder


@pytest.mark.parametrize("kind", [PARAMS[0], PARAMS[2], REMOTE], indirect=True)
def test_a_folder_and_a_file_are_seen_where_they_were_asked_for_and_cannot_be_changed(kind: Kind, levels: Path) -> None:
    views = ((str(levels), "/data/levels"), (str(levels / "one"), "/opt/first"))
    has_root = kind.name == "local" and kind.backend().capabilities()["uid"]

    async def main() -> None:
        async with kind.sandbox(views=views) as sandbox:
            seen = await sandbox.exec(["cat", "/data/levels/one", "/opt/first"], timeout_s=20)
            assert seen.stdout == "floor 1\nfloor 1\n"
            for change in ("echo x > /data/levels/one", "echo x > /opt/first", "touch /data/levels/two"):
                for user in ("agent", "root") if has_root else ("agent",):
                    done = await sandbox.exec(["sh", "-c", change], timeout_s=20, user=user)
                    assert "Read-only file system" in done.stderr

    run(main)
    assert [path.name for path in levels.iterdir()] == ["one"]


@pytest.mark.docker
def test_not_even_the_root_of_a_system_container_changes_one(levels: Path) -> None:
    async def main() -> None:
        async with KINDS["docker"].sandbox(views=((str(levels), "/data"),), profile="system") as sandbox:
            done = await sandbox.exec(["sh", "-c", "cat /data/one; rm /data/one"], timeout_s=20)
            assert done.stdout == "floor 1\n"
            assert "Read-only file system" in done.stderr

    run(main)


REFUSED = [
    ("levels", "/data", "'levels' must be an absolute path of this machine"),
    ("/nowhere/levels", "/data", "'/nowhere/levels' is not a file or folder on this machine"),
    ("/dev/null", "/data", "'/dev/null' is not a file or folder on this machine"),
    ("/usr", "data", "'data' must be an absolute path in the sandbox"),
    ("/usr", "/data/../etc", "'/data/../etc' must be an absolute path in the sandbox"),
    ("/usr", "/", "'/' is reserved for the sandbox"),
    ("/usr", "/proc/self", "'/proc/self' is reserved for the sandbox"),
    ("/usr", "/workspace/data", "'/workspace/data' is reserved for the sandbox"),
    ("/usr", "/srv/data/more", "'/srv/data/more' and '/srv/data' overlap"),
]


@ISOLATING
def test_a_view_that_cannot_be_is_refused_with_the_reason(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            for source, place, reported in REFUSED:
                with pytest.raises(SandboxRefusedError) as refusal:
                    await backend.start(kind.spec(views=(("/usr", "/srv/data"), (source, place))))
                assert refusal.value.cause.detail.startswith(f"views is refused: {reported}")

    run(main)


@pytest.mark.bwrap
def test_a_view_that_would_cover_what_the_sandboxs_python_needs_is_refused(levels: Path, tmp_path: Path) -> None:
    from envkit.sandbox.bubblewrap.backend import LocalBackend

    async def main() -> None:
        async with LocalBackend(readable=["/opt/python/lib"]) as backend:
            with pytest.raises(SandboxRefusedError, match=r"'/opt/python' and '/opt/python/lib' overlap"):
                await backend.start(KINDS["local"].spec(views=((str(levels), "/opt/python"),)))

    run(main)


def test_a_plain_process_takes_none(levels: Path) -> None:
    async def main() -> None:
        async with KINDS["process"].backend() as backend:
            with pytest.raises(SandboxRefusedError, match="the backend `process` does not support"):
                await backend.start(KINDS["process"].spec(views=((str(levels), "/data"),)))

    run(main)
