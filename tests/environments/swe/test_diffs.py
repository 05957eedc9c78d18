"""Reversed diffs and diffs between texts: git applies them and finds the original again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from envkit.environments.swe.formats.diffs import between, reverse


def git(folder: Path, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], input=stdin.encode(), capture_output=True, check=True)
    return done.stdout.decode()


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    paths = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(folder)): (path.read_bytes(), bool(path.stat().st_mode & 0o100)) for path in paths}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("".join(f"line {number}\n" for number in range(40)))
    (tmp_path / "end.txt").write_text("one\ntwo")
    (tmp_path / "gone.txt").write_text("x\n-- y\n++ z\n")
    (tmp_path / "form feed.py").write_text("one\x0ctwo\r\nthree\u2028four\r\n")
    (tmp_path / "script").write_text("echo\n")
    (tmp_path / "moved.py").write_text("".join(f"moved {number}\n" for number in range(20)))
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-q", "-m", "start")
    return tmp_path


def test_a_reversed_diff_restores_every_kind_of_change(repository: Path) -> None:
    before = tree(repository)
    lines = (repository / "a.py").read_text().split("\n")
    lines[3:5], lines[30] = ["new", "--- new", "+++ newer"], ""
    (repository / "a.py").write_text("\n".join(lines))
    (repository / "end.txt").write_text("one\nthree\ntwo")
    (repository / "gone.txt").unlink()
    (repository / "new.txt").write_text("@@ -1 +1 @@\nno end")
    (repository / "form feed.py").write_text("one\x0ctwo\r\nthree\u2028five\r\n")
    (repository / "script").chmod(0o755)
    (repository / "moved.py").rename(repository / "here.py")
    git(repository, "add", "-A")
    diff = git(repository, "diff", "--cached", "-M")
    assert {"rename from moved.py", "new mode 100755", "deleted file mode 100644"} <= set(diff.split("\n"))
    after = tree(repository)

    git(repository, "apply", stdin=reverse(diff))
    assert tree(repository) == before
    git(repository, "apply", stdin=reverse(reverse(diff)))
    assert tree(repository) == after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *[(None, "x\ny"), ("x\ny\n", None), ("a\nb", "a\nb\n"), ("a\n", "a"), ("a\rb\n", "a\rc\n")],
        *[("a\x0cb\r\nc", "a\x0cb\r\nd"), ("ä\u2028b\n", "ä\u2028c\n")],
    ],
)
def test_git_applies_the_diff_between_two_texts(tmp_path: Path, old: str | None, new: str | None) -> None:
    git(tmp_path, "init", "-q")
    file = tmp_path / "x.py"
    if old is not None:
        file.write_bytes(old.encode())
    git(tmp_path, "apply", stdin=between("x.py", old, new))
    assert (file.read_bytes().decode() if file.exists() else None) == new


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n x\n-y\n+z\n", "ends within a hunk"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n x\nwhat\n", "a hunk has the line 'what'"),
        ("diff --git a/x b/x\nindex 1..2\nGIT binary patch\nliteral 1\n", "cannot be reversed"),
    ],
)
def test_a_diff_that_cannot_be_reversed_is_an_error(diff: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reverse(diff)
