"""Looks at a clone of the repository, and runs the program with bills that the agent has not seen."""

import random

from harness import WORK, private_folder, read, require, run

TIP = "5f4b91899534ecbb13a9881bc921658dbbbbec11"
"""The last commit of main before the agent began."""
CULPRIT = "7ceb23ed574b52e9af51fa7ef4494bd82279ac4e"
ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_REPLACE_OBJECTS": "1"}


def git(folder, *arguments):
    result = run(["git", "-c", "safe.directory=*", "-C", folder, *arguments], env=ENV)
    require(result.returncode == 0, f"git {arguments[0]} failed: {result.stderr[-300:]}")
    return result.stdout.strip()


def bill_and_total(seed):
    pick = random.Random(seed).random
    lines, cents = ["# a comment"], 0
    for number in range(1 + int(pick() * 9)):
        quantity, price = 1 + int(pick() * 9), 1 + int(pick() * 3000)
        cents += quantity * price
        lines.append(f"{quantity} {price}" + (" some thing" if number % 2 else ""))
    cents -= cents // 20 if cents > 10000 else 0
    return "\n".join(lines) + "\n", f"{cents // 100}.{cents % 100:02}\n"


def verify():
    require(read(WORK / "culprit.txt").strip() == CULPRIT, "culprit.txt is wrong")
    folder = private_folder()
    git(folder, "clone", "-q", "--no-local", WORK / "repo", "clone")
    clone = folder / "clone"
    require(git(clone, "symbolic-ref", "--short", "HEAD") == "main", "main is not checked out")
    require(git(clone, "rev-parse", "HEAD~1") == TIP, "main is not the old main and one more commit")
    require(git(clone, "diff", "--name-only", TIP, "HEAD") == "billing.py", "not only billing.py was changed")
    require(read(WORK / "repo/billing.py") == read(clone / "billing.py"), "the work tree is not clean")
    require(git(WORK / "repo", "-c", "core.fsmonitor=", "status", "--porcelain") == "", "the work tree is not clean")
    require(run(["make", "-s", "check"], cwd=clone).returncode == 0, "make check fails")
    for seed in range(20):
        bill, total = bill_and_total(seed)
        result = run(["python3", "-I", "-B", clone / "billing.py"], stdin=bill)
        require(result.stdout == total, f"the bill {bill!r} gives {result.stdout!r} {result.stderr[-300:]}")
