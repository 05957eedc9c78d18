"""Looks at clones of the repository and of one that the agent has not seen: history, restored commit, work tree."""

import random
import shutil

from harness import WORK, as_agent, private_folder, read, require, run, write

TIP = "ba5271d16f5650cbe6994ef0d5078acd15103398"
"""The last commit of main before the agent began."""
TREE = "e84a7b4bceb87dc5a97f07672b16df213b8b4c69"
"""The tree of the wanted commit on top of it."""
EXPECTED = "Add retry logic|Robin|2024-05-02T09:13:00+00:00"
SHOWN = "--format=%s|%an|%aI"
HIDDEN = 5309
ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_REPLACE_OBJECTS": "1"}


def git(folder, *arguments, date=""):
    env = {**ENV, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date} if date else ENV
    result = run(["git", "-c", "safe.directory=*", "-C", folder, *arguments], env=env)
    require(result.returncode == 0, f"git {arguments[0]} failed: {result.stderr[-300:]}")
    return result.stdout.strip()


def other_repository(seed):
    """Make a repository with a lost commit; return its folder, the commit's message, and what `check` expects."""
    draw, seconds = random.Random(seed), 1_700_000_000
    folder = private_folder() / "other repository"
    git("/", "init", "-q", "-b", "main", folder)
    git(folder, "config", "user.name", f"Ada {draw.randrange(100)}")
    git(folder, "config", "user.email", "ada@example.com")

    def commit(message, *names, amend=False):
        nonlocal seconds
        seconds += 60 + draw.randrange(9000)
        for name in names:
            write(folder / name, "".join(f"{draw.randrange(10**9)}\n" for _ in range(9)))
        git(folder, "add", "-A")
        git(folder, "commit", "-q", *["--amend"] * amend, "-m", message, date=f"{seconds} +0000")

    wanted = f"Limit the cache to {draw.randrange(1000)} entries"
    commit("Store entries", "store", "README")
    for attempt in range(3 + draw.randrange(4)):
        commit(wanted, "store", "limits", amend=attempt > 0)
    files = {name: read(folder / name) for name in ("store", "limits")}
    expected = git(folder, "show", "-s", SHOWN)
    git(folder, "reset", "-q", "--hard", "HEAD~1")
    commit("Explain the store", "README")
    git(folder, "checkout", "-q", "-b", "experiment")
    commit(f"{wanted}, or more", "store", "limits")
    git(folder, "checkout", "-q", "main")
    git(folder, "branch", "-q", "-D", "experiment")
    commit("Add a license", "LICENSE")
    git(folder, "reflog", "expire", "--expire=now", "--all")
    with as_agent():
        (folder / ".git/ORIG_HEAD").unlink()

    clone = private_folder() / "clone"
    git("/", "clone", "-q", "--no-local", folder, clone)
    for name, content in files.items():
        write(clone / name, content)
    git(clone, "add", "-A")
    tip, tree = git(clone, "rev-parse", "HEAD"), git(clone, "write-tree")
    with as_agent():
        shutil.rmtree(clone)  # `restore` could copy its files
    return folder, wanted, (tip, tree, expected)


def check(repository, tip, tree, expected):
    folder = private_folder()
    git(folder, "clone", "-q", "--no-local", repository, "clone")
    clone = folder / "clone"
    require(git(clone, "symbolic-ref", "--short", "HEAD") == "main", "main is not checked out")
    require(git(clone, "rev-parse", "HEAD~1") == tip, "main is not the old main and one more commit")
    require(git(clone, "show", "-s", SHOWN) == expected, "message, author or author date differ")
    require(git(clone, "rev-parse", "HEAD^{tree}") == tree, "the content differs from that of the lost commit")
    require(git(repository, "-c", "core.fsmonitor=", "status", "--porcelain") == "", "the work tree is not clean")
    with as_agent():
        names, expected = (sorted(file.name for file in folder.iterdir()) for folder in (repository, clone))
    require(names == expected, f"the work tree has other files: {names}")
    for name in set(names) - {".git"}:
        require(read(repository / name) == read(clone / name), f"{name} of the work tree differs")


def verify():
    check(WORK / "repo", TIP, TREE, EXPECTED)
    repository, message, expected = other_repository(HIDDEN)
    result = run([WORK / "restore", repository, message], timeout_s=30)
    require(result.returncode == 0, f"restore failed in another repository: {result.stderr[-500:]}")
    check(repository, *expected)
