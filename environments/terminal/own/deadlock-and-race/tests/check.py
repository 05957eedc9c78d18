"""Compiles the program anew, and runs it with inputs that the agent has not seen, also under helgrind."""

import random
import time

from harness import WORK, compile_c, require, run

HELGRIND = ["valgrind", "--tool=helgrind", "-q", "--error-exitcode=9"]


def transfers(seed, accounts, count, amount):
    pick = random.Random(seed).random
    lines = [f"{accounts} {amount}"]
    for _ in range(count):
        lines.append(f"{int(pick() * accounts)} {int(pick() * accounts)} {1 + int(pick() * amount)}")
    return "\n".join(lines) + "\n"


def verify():
    program = compile_c(WORK / "transfer.c", "-pthread")

    def amounts(text, threads, pause=0, prefix=()):
        """Run the program, and return the amounts and the numbers of done and refused transfers."""
        words = [*prefix, program, threads, pause]
        result = run(words, stdin=text, cwd="/", env={"HOME": "/"}, timeout_s=40 if prefix else 8)
        require(result.returncode == 0, f"exit code {result.returncode}: {result.stderr[-700:]}")
        lines = result.stdout.splitlines()
        return [int(line.split()[-1]) for line in lines[:-2]], *(int(line.split()[-1]) for line in lines[-2:])

    one_way = "3 50\n" + "0 1 20\n" * 7 + "2 2 50\n2 2 51\n"
    require(amounts(one_way, 1) == ([10, 90, 50], 3, 6), "wrong result of one thread")
    require(amounts(one_way, 8, 1) == ([10, 90, 50], 3, 6), "wrong result of eight threads")
    ring = "8 1000\n" + "".join(f"{n % 8} {(n + 1) % 8} 1\n" for n in range(800))
    for number in range(12):
        require(amounts(ring, 8) == ([1000] * 8, 800, 0), "wrong result of transfers in a ring")
        count = 400 + number
        found, done, refused = amounts(transfers(number, 3 + number % 4, count, 90), 8)
        require(sum(found) == 90 * (3 + number % 4) and min(found) >= 0, f"amounts appeared or vanished: {found}")
        require(done + refused == count, f"{done} + {refused} transfers of {count}")
    began = time.monotonic()
    found, done, refused = amounts("2 1000\n" + "0 1 7\n1 0 7\n" * 20, 8, 20)
    require((found, done, refused) == ([1000, 1000], 40, 0), "wrong result of opposite transfers")
    require(time.monotonic() - began > 0.8, "transfers between the same accounts ran at the same time")
    for seed in range(2):
        amounts(transfers(seed, 5, 120, 60), 4, 0, HELGRIND)

    for rounds in (1, 2):
        times = []
        for _ in range(3):
            began = time.monotonic()
            amounts("16 9\n" + "".join(f"{2 * n} {2 * n + 1} 1\n" for n in range(8)) * rounds, 8, 200)
            times.append(time.monotonic() - began)
        took = f"{rounds} of 8 independent transfers of 200 ms took {min(times):.2f} s"
        require(0.2 * rounds <= min(times) < 1.0, took)
