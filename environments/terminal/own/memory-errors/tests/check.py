"""Compiles the program anew, and runs it with inputs that the agent has not seen, also under valgrind."""

import random
from collections import Counter

from harness import WORK, compile_c, require, run

VALGRIND = [
    "valgrind",
    "-q",
    "--trace-children=yes",
    "--error-exitcode=9",
    "--leak-check=full",
    "--errors-for-leak-kinds=definite,indirect,possible",
]


def text_of(seed):
    pick = random.Random(seed).random
    lines = []
    for _ in range(int(pick() * 60)):
        words = [
            "".join("abAB09_-"[int(pick() * 8)] for _ in range(1 + int(pick() * (300 if pick() < 0.1 else 2))))
            for _ in range(int(pick() * (40 if pick() < 0.1 else 4)))
        ]
        lines.append(" \t"[int(pick() * 2)].join(words) + " " * int(pick() * 2))
    return "\n".join(lines) + "\n" * int(pick() * 2)


def expected(text):
    columns = []
    for line in text.splitlines():
        for index, word in enumerate(line.split()):
            columns.extend([Counter()] if index == len(columns) else [])
            columns[index][word] += 1
    lines = []
    for number, column in enumerate(columns, 1):
        lines += [f"column {number}", *(f"  {column[word]} {word}" for word in sorted(column))]
    return lines


def verify():
    program = compile_c(WORK / "columns.c")
    texts = ["", "\n\n", "one", "a " * 3000, "x" * 100000 + " y\n", *(text_of(seed) for seed in range(15))]
    for number, text in enumerate(texts):
        for prefix in ([], VALGRIND) if 2 <= number < 8 else ([],):
            # The program can write neither to the folder nor to HOME, where valgrind has its settings.
            result = run([*prefix, program], stdin=text, cwd="/", env={"HOME": "/"}, timeout_s=40)
            require(result.returncode == 0, f"exit code {result.returncode} for {text[:200]!r}: {result.stderr[-500:]}")
            require(result.stdout.splitlines() == expected(text), f"wrong output for {text[:200]!r}")
