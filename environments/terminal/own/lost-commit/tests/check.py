"""Looks at a clone of the repository: its history, the restored commit and the files of the work tree."""

from harness import WORK, as_agent, private_folder, read, require, run

TIP = "ba5271d16f5650cbe6994ef0d5078acd15103398"
"""The last commit of main before the agent began."""
TREE = "e84a7b4bceb87dc5a97f07672b16df213b8b4c69"
"""The tree of the wanted commit on top of it."""
EXPECTED = "Add retry logic|Robin|2024-05-02T09:13:00+00:00"
ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_REPLACE_OBJECTS": "1"}


def git(folder, *arguments):
    result = run(["git", "-c", "safe.directory=*", "-C", folder, *arguments], env=ENV)
    require(result.returncode == 0, f"git {arguments[0]} failed: {result.stderr[-300:]}")
    return result.stdout.strip()


def verify():
    folder = private_folder()
    git(folder, "clone", "-q", "--no-local", WORK / "repo", "clone")
    clone = folder / "clone"
    require(git(clone, "symbolic-ref", "--short", "HEAD") == "main", "main is not checked out")
    require(git(clone, "rev-parse", "HEAD~1") == TIP, "main is not the old main and one more commit")
    require(git(clone, "show", "-s", "--format=%s|%an|%aI") == EXPECTED, "message, author or author date differ")
    require(git(clone, "rev-parse", "HEAD^{tree}") == TREE, "the content differs from that of the lost commit")
    require(git(WORK / "repo", "-c", "core.fsmonitor=", "status", "--porcelain") == "", "the work tree is not clean")
    with as_agent():
        names, expected = (sorted(file.name for file in folder.iterdir()) for folder in (WORK / "repo", clone))
    require(names == expected, f"the work tree has other files: {names}")
    for name in set(names) - {".git"}:
        require(read(WORK / "repo" / name) == read(clone / name), f"{name} of the work tree differs")
