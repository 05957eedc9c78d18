"""Trees of tasks, and patches with paths that nobody should trust."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from envkit import clock
from envkit.environments.swe.checkout import between, changes_of_patch, source_of
from envkit.environments.swe.env import OWN_TASKS
from envkit.environments.swe.packages import unpack
from envkit.environments.swe.tasks import Lock, LockedPackage, read_folder
from envkit.errors import UsageError

from .tiny import BASE, BUG, BUGGY, CORE, FIX, FIXED, sdist, task


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    sdist(tmp_path)
    return clock.run(partial(source_of, task(), tmp_path))


def test_a_tree_has_the_bug_and_its_base_does_not(tmp_path: Path) -> None:
    base = sdist(tmp_path)
    assert (clock.run(partial(source_of, task(), tmp_path)) / CORE).read_bytes() == BUGGY
    assert (unpack(base, tmp_path / "trees") / CORE).read_bytes() == FIXED


def test_a_tree_is_made_once_however_many_ask_for_it(tmp_path: Path) -> None:
    sdist(tmp_path)
    trees: list[Path] = []

    async def make() -> None:
        trees.append(await source_of(task(), tmp_path))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(make)

    clock.run(main)
    assert len(set(trees)) == 1
    assert sorted(path.name for path in (tmp_path / "trees").iterdir()) == [
        trees[0].name.rpartition("+")[0],
        trees[0].name,
    ]


def test_a_source_distribution_with_another_hash_is_refused(tmp_path: Path) -> None:
    sdist(tmp_path)
    package = LockedPackage(requirement="", base=BASE, sha256="0" * 64, licence="", tests=1, suite_s=1.0)
    lock = Lock(command="", environment=(), packages=(package,))
    with pytest.raises(UsageError, match="is not the file that the tasks were made of"):
        clock.run(partial(source_of, task(), tmp_path, lock))


def test_the_package_of_envkit_needs_no_hash(tmp_path: Path) -> None:
    (own, *_), lock = read_folder(OWN_TASKS)
    packages = tuple(replace(one, sha256="0" * 64) for one in lock.packages)  # as in folders of earlier versions
    assert clock.run(partial(source_of, own, tmp_path, replace(lock, packages=packages))).is_dir()


def test_a_patch_gives_the_new_content_of_its_files_and_leaves_the_tree_alone(tree: Path) -> None:
    added = "--- /dev/null\n+++ b/src/tiny/new.py\n@@ -0,0 +1 @@\n+x = 1\n"
    assert changes_of_patch(tree, FIX + added) == {CORE: FIXED, "src/tiny/new.py": b"x = 1\n"}
    assert (tree / CORE).read_bytes() == BUGGY
    assert changes_of_patch(tree, "") == {}


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        (FIX.replace(CORE, "../core.py"), "must not contain"),
        (FIX.replace(CORE, "/etc/passwd").replace("a//", "/").replace("b//", "/"), "apply|relative"),
        (FIX.replace(CORE, ".git/config"), "apply|must not contain"),
        (FIX.replace(CORE, "src/link/core.py"), "linked folder"),
        ("diff --git a/x b/x\nnew file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+/etc\n", "new file mode 1"),
        ("diff --git a/setup.py b/setup.py\nold mode 100644\nnew mode 100755\n", "old mode"),
        ("diff --git a/setup.py b/x.py\nsimilarity index 100%\nrename from setup.py\nrename to x.py\n", "rename from"),
        ("--- a/setup.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x = 1\n", "must not delete files"),
        (BUG, "does not apply"),
        ("not a patch", "does not apply"),
    ],
)
def test_a_patch_that_does_more_than_change_the_text_of_files_of_the_tree_is_refused(
    tree: Path, patch: str, problem: str
) -> None:
    (tree / "setup.py").write_text("x = 1\n")
    (tree / "src/link").symlink_to(tree / "src/tiny", target_is_directory=True)
    with pytest.raises(UsageError, match=problem):
        changes_of_patch(tree, patch)


def test_without_git_the_error_names_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PATH", "/nonexistent")
    with pytest.raises(UsageError, match="git was not found; install git"):
        changes_of_patch(tree, FIX)


def test_a_diff_applied_as_a_patch_gives_the_same_changes(tree: Path) -> None:
    (tree / "src/tiny/odd.py").write_bytes(b"a = 1\x0c\nb = '\xe2\x80\xa8'\nc = 1\r\nlast")
    changes = {
        CORE: FIXED,
        "src/tiny/odd.py": b"a = 2\x0c\nb = '\xe2\x80\xa8'\nc = 2\r\nlast line",
        "setup.py": b"x = 1\n",
    }
    patch = "".join(between(path, (tree / path).read_bytes(), content) for path, content in changes.items())
    assert changes_of_patch(tree, patch) == changes


def test_the_patches_of_our_own_tasks_fit_the_lines_that_they_name() -> None:
    tasks, _ = read_folder(OWN_TASKS)
    package = OWN_TASKS / "package"
    assert len(tasks) == 12
    for one in tasks:
        ((path, changed),) = changes_of_patch(package, one.bug_patch).items()
        assert between(path, (package / path).read_bytes(), changed) == one.bug_patch
