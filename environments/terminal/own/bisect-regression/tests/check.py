"""Looks at clones of the repository and of one that the agent has not seen, and runs the program with other bills."""

import random

from harness import WORK, private_folder, read, require, run, write

TIP = "5f4b91899534ecbb13a9881bc921658dbbbbec11"
"""The last commit of main before the agent began."""
CULPRIT = "7ceb23ed574b52e9af51fa7ef4494bd82279ac4e"
HIDDEN = 2917
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


def rules_file(factors):
    rules = [f"def rule_{number}(x):\n    return {factor} * x\n" for number, factor in enumerate(factors)]
    return "\n\n".join(["import sys\n", *rules, 'print(globals()["rule_" + sys.argv[1]](int(sys.argv[2])))\n'])


def other_repository(seed):
    """Make another repository; return its folder, the tip, the culprit, and `rules.py` without its changes."""
    draw = random.Random(seed)
    folder = private_folder() / "other repository"
    git("/", "init", "-q", "-b", "main", folder)
    git(folder, "config", "user.name", "Ada")
    git(folder, "config", "user.email", "ada@example.com")
    factors = [draw.randrange(2, 90) for _ in range(7)]
    checked, bad = draw.randrange(7), draw.randrange(5, 12)
    others = [number for number in range(7) if number != checked]
    expected = f'test "$$(python3 -B rules.py {checked} 3)" = {3 * factors[checked]}'
    write(folder / "Makefile", f".PHONY: check\ncheck:\n\t{expected}\n")
    write(folder / "rules.py", rules_file(factors))
    write(folder / "NOTES", "")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Start")
    notes, culprit, good = "", "", factors[checked]
    for number in range(16):
        if number == bad:
            factors[checked] += draw.randrange(1, 9)
        elif number % 2:
            factors[draw.choice(others)] = draw.randrange(2, 90)
        notes += f"{number}: {draw.randrange(1000)}\n"
        write(folder / "NOTES", notes)
        write(folder / "rules.py", rules_file(factors))
        git(folder, "commit", "-q", "-a", "-m", f"Change {number}")
        if number == bad:
            culprit = git(folder, "rev-parse", "HEAD")
    factors[checked] = good
    return folder, git(folder, "rev-parse", "HEAD"), culprit, rules_file(factors)


def check(repository, file, tip):
    """Look at a clone of a repository in which a commit that changes `file` was added to `tip`; return it."""
    folder = private_folder()
    git(folder, "clone", "-q", "--no-local", repository, "clone")
    clone = folder / "clone"
    require(git(clone, "symbolic-ref", "--short", "HEAD") == "main", "main is not checked out")
    require(git(clone, "rev-parse", "HEAD~1") == tip, "main is not the old main and one more commit")
    require(git(clone, "diff", "--name-only", tip, "HEAD") == file, f"not only {file} was changed")
    require(read(repository / file) == read(clone / file), "the work tree is not clean")
    require(git(repository, "-c", "core.fsmonitor=", "status", "--porcelain") == "", "the work tree is not clean")
    require(run(["make", "-s", "check"], cwd=clone).returncode == 0, "make check fails")
    return clone


def verify():
    require(read(WORK / "culprit.txt").strip() == CULPRIT, "culprit.txt is wrong")
    clone = check(WORK / "repo", "billing.py", TIP)
    for seed in range(20):
        bill, total = bill_and_total(seed)
        result = run(["python3", "-I", "-B", clone / "billing.py"], stdin=bill)
        require(result.stdout == total, f"the bill {bill!r} gives {result.stdout!r} {result.stderr[-300:]}")

    folder, tip, culprit, rules = other_repository(HIDDEN)
    result = run([WORK / "repair", folder, "rules.py"], timeout_s=30)
    shown = f"{result.stdout[-200:]!r} {result.stderr[-500:]}"
    require(result.returncode == 0 and result.stdout.strip() == culprit, f"repair in another repository prints {shown}")
    require(read(check(folder, "rules.py", tip) / "rules.py") == rules, "repair reverts the wrong changes")
