"""Small scripts: write programs with arguments, standard input, options, exit statuses and state."""

from __future__ import annotations

import operator
import shlex
from collections.abc import Callable, Sequence

from .family import Case, Draw, DrawnTask, Family, lines, run_case, write_file


def _numbers(draw: Draw, low: int, high: int, count: int) -> list[int]:
    return [draw.number(low, high) for _ in range(count)]


def _echo(draw: Draw) -> DrawnTask:
    name, text = draw.script("sh"), draw.sentence(1, 3)
    return DrawnTask(
        instruction=draw.either(
            f'Write a shell script {name} that prints "{text}".',
            f"Create the script {name}. When it is run with bash, it prints this text: {text}",
        ),
        solution=write_file(name, f"echo {text}"),
        checks=run_case(f"bash {name}", stdout=text),
    )


def _sequence(draw: Draw) -> DrawnTask:
    name, first, step = draw.script("sh"), draw.number(1, 500), draw.either(1, 1, 1, 2, 3, 5, 10)
    last = first + step * draw.number(5, 40)
    return DrawnTask(
        instruction=f"Write a shell script {name} that prints the numbers from {first} to "
        f"{last}{'' if step == 1 else f' in steps of {step}'}, one a line.",
        solution=write_file(name, f"seq {first} {step} {last}"),
        checks=run_case(f"bash {name}", stdout=lines(range(first, last + 1, step))),
    )


def _arguments(draw: Draw) -> DrawnTask:
    name, (a, b), factor = draw.script("sh"), _numbers(draw, 100, 9999, 2), draw.number(2, 99)
    what, expression, value = draw.either(
        (f"the sum of its two arguments plus {factor}", f"$1 + $2 + {factor}", a + b + factor),
        (f"its first argument times {factor}", f"$1 * {factor}", a * factor),
        (f"the product of its two arguments plus {factor}", f"$1 * $2 + {factor}", a * b + factor),
        (f"its first argument minus {factor}", f"$1 - {factor}", a - factor),
    )
    arguments = (str(a), str(b)) if "two" in what else (str(a),)
    return DrawnTask(
        instruction=f"Write a shell script {name} that prints {what}. For example, it is run as `bash {name} "
        f"{' '.join(str(int(x) + 1) for x in arguments)}`.",
        solution=write_file(name, f"echo $(({expression}))"),
        checks=run_case(f"bash {name} {' '.join(arguments)}", stdout=str(value)),
    )


def _each_line(draw: Draw) -> DrawnTask:
    name, mark = draw.script("sh"), draw.either(":", ")", "|", " -", ">")
    text = [draw.sentence(1, 6) for _ in range(draw.number(6, 12))]
    backwards = 'awk \'{ for (i = NF; i > 0; i--) printf "%s%s", $i, i > 1 ? " " : "\\n" }\''
    letters = "awk '{ text = \"\"; for (i = length($0); i > 0; i--) text = text substr($0, i, 1); print text }'"
    changes: tuple[tuple[str, str, Callable[[str], str]], ...] = (
        ("with its characters in reverse order", letters, lambda line: line[::-1]),
        ("in upper case", "tr a-z A-Z", lambda line: line.upper()),
        ("with its words in reverse order", backwards, lambda line: " ".join(line.split()[::-1])),
        ("without its first word", "sed 's/^[^ ]* *//'", lambda line: line.partition(" ")[2]),
        (
            "with the number of its words and a space before it",
            "awk '{ print NF, $0 }'",
            lambda line: f"{len(line.split())} {line}",
        ),
    )
    what, program, change = draw.one(changes)
    numbered = f"{program} | awk '{{ print NR \"{mark} \" $0 }}'"
    return DrawnTask(
        instruction=f"Write a shell script {name} that reads lines from standard input and prints each line {what}; "
        f"before that, each line of the output has the number of the line, from 1, and `{mark} `, such as `1{mark} "
        f"...`. It is run as `bash {name} < FILE`. The input has only lower-case letters and single spaces.",
        solution=write_file(name, numbered),
        checks=run_case(
            f"bash {name}",
            stdin=lines(text),
            stdout=lines(f"{number}{mark} {change(line)}" for number, line in enumerate(text, 1)),
        ),
    )


def _choose(draw: Draw) -> DrawnTask:
    name, words = draw.script("sh"), draw.words(3)
    limits = sorted(draw.some(range(10, 990), 2))
    code = draw.number(2, 99)

    def word(value: int) -> str:
        return words[0] if value < limits[0] else words[1] if value <= limits[1] else words[2]

    values = [limits[0] - 1, limits[0], limits[1], limits[1] + 1, draw.number(1, 999)]
    program = f"""
if [ $# != 1 ]; then exit {code}; fi
if [ "$1" -lt {limits[0]} ]; then echo {words[0]}
elif [ "$1" -le {limits[1]} ]; then echo {words[1]}
else echo {words[2]}; fi
"""
    return DrawnTask(
        instruction=f"Write a shell script {name} with one argument, an integer. It prints {words[0]} if the number "
        f"is below {limits[0]}, {words[1]} if it is from {limits[0]} to {limits[1]}, and {words[2]} if it is above "
        f"{limits[1]}. Without arguments, or with more than one, it prints nothing and ends with the exit status "
        f"{code}.",
        solution=write_file(name, program),
        checks=[
            *(case for value in values for case in run_case(f"bash {name} {value}", stdout=word(value))),
            *run_case(f"bash {name}", stdout="", exit=code),
            *run_case(f"bash {name} 1 2", stdout="", exit=code),
        ],
    )


def _multiples(draw: Draw) -> DrawnTask:
    name, (a, b), (first, second) = draw.script("sh"), draw.some((2, 3, 4, 5, 6, 7, 8, 9, 11), 2), draw.words(2)
    count = draw.number(30, 120)

    def text(number: int) -> str:
        return (first if number % a == 0 else "") + (second if number % b == 0 else "") or str(number)

    program = f"""
for i in $(seq "$1"); do
  text=
  if [ $((i % {a})) = 0 ]; then text={first}; fi
  if [ $((i % {b})) = 0 ]; then text=${{text}}{second}; fi
  echo "${{text:-$i}}"
done
"""
    return DrawnTask(
        instruction=f"Write a shell script {name}, run as `bash {name} N`, that prints a line for each number from 1 "
        f"to N: {first} if it is a multiple of {a}, {second} if it is a multiple of {b}, {first}{second} if it is a "
        "multiple of both, and otherwise the number.",
        solution=write_file(name, program),
        checks=[
            *run_case(f"bash {name} {count}", stdout=lines(map(text, range(1, count + 1)))),
            *run_case(f"bash {name} 1", stdout="1"),
        ],
    )


def _statistics(draw: Draw) -> DrawnTask:
    name = draw.script(draw.either("sh", "py"))
    parts: dict[str, Callable[[list[int]], int]] = {
        "sum": sum,
        "smallest": min,
        "largest": max,
        "count": len,
        "range": lambda numbers: max(numbers) - min(numbers),
        "negative": lambda numbers: sum(number < 0 for number in numbers),
        "even": lambda numbers: sum(number % 2 == 0 for number in numbers),
    }
    meaning = {
        "range": "largest minus smallest",
        "negative": "how many are below 0",
        "even": "how many are even",
        "count": "how many there are",
    }
    chosen, mark = draw.some(list(parts), 4), draw.either("=", ": ", " ")
    program = f"""
import sys
n = [int(word) for word in sys.stdin.read().split()]
values = dict(sum=sum(n), smallest=min(n), largest=max(n), count=len(n), range=max(n) - min(n))
values.update(negative=sum(x < 0 for x in n), even=sum(x % 2 == 0 for x in n))
for key in "{" ".join(chosen)}".split():
    print(key, values[key], sep="{mark}")
"""
    if name.endswith(".sh"):
        program = f"python3 /dev/fd/3 3<<'PYTHON'\n{program.strip()}\nPYTHON"
    inputs = [_numbers(draw, -999, 999, draw.number(5, 30)), _numbers(draw, 1, 9, 1)]
    explained = ", ".join(f"{key} ({meaning[key]})" if key in meaning else key for key in chosen)
    run = "bash" if name.endswith(".sh") else "python3"
    return DrawnTask(
        instruction=f"Write a script {name}, run as `{run} {name} < FILE`, that reads integers separated by blanks "
        f"and line ends, and prints four lines KEY{mark}VALUE with these values of the numbers, in this order: "
        f"{explained}. There is at least one number.",
        solution=write_file(name, program),
        checks=[
            case
            for numbers in inputs
            for case in run_case(
                f"{run} {name}",
                stdin="\n".join([" ".join(map(str, numbers[:4])), *map(str, numbers[4:])]) + "\n",
                stdout=lines(f"{key}{mark}{parts[key](numbers)}" for key in chosen),
            )
        ],
    )


def _cipher(draw: Draw) -> DrawnTask:
    name, shift = draw.script("py"), draw.number(2, 24)
    letters = "abcdefghijklmnopqrstuvwxyz"
    table = str.maketrans(
        letters + letters.upper(), letters[shift:] + letters[:shift] + letters[shift:].upper() + letters[:shift].upper()
    )
    texts = [
        " ".join(
            draw.either(word, word.upper(), word.capitalize() + ",", str(draw.number(1, 99))) for word in draw.words(6)
        )
        for _ in range(4)
    ]
    program = f"""
import sys
letters = "abcdefghijklmnopqrstuvwxyz"
shift = -{shift} if sys.argv[1:] == ["-d"] else {shift}
moved = letters[shift:] + letters[:shift]
print(sys.stdin.read().translate(str.maketrans(letters + letters.upper(), moved + moved.upper())), end="")
"""
    plain, secret = lines(texts), lines(texts).translate(table)
    return DrawnTask(
        instruction=f"Write a Python program {name} that replaces each letter of standard input by the letter {shift} "
        "places after it in the alphabet (z is followed by a), keeps upper and lower case and all other characters, "
        f"and prints the result. With the option -d it goes {shift} places back instead. It is run as `python3 {name} "
        f"< FILE` or `python3 {name} -d < FILE`.",
        solution=write_file(name, program),
        checks=[
            *run_case(f"python3 {name}", stdin=plain, stdout=secret),
            *run_case(f"python3 {name} -d", stdin=secret, stdout=plain),
        ],
    )


def _calculator(draw: Draw) -> DrawnTask:
    name, (error, code) = draw.script("py"), (draw.either("error", "invalid", "bad input", "?"), draw.number(2, 99))
    symbols = draw.either(("+", "-", "*", "max"), ("add", "sub", "mul", "max"), ("plus", "minus", "times", "larger"))
    plus, minus, times, larger = symbols
    functions: tuple[Callable[[int, int], int], ...] = (operator.add, operator.sub, operator.mul, max)
    apply = dict(zip(symbols, functions, strict=True))

    def expression() -> str:
        words, depth = [str(draw.number(1, 50)), str(draw.number(1, 50))], 2
        for _ in range(draw.number(4, 9)):
            if depth > 1 and draw.chance(0.6):
                words.append(draw.one(list(apply)))
                depth -= 1
            else:
                words.append(str(draw.number(-9, 50)))
                depth += 1
        words += [draw.one(list(apply)) for _ in range(depth - 1)]
        if draw.chance(0.35):
            words[draw.number(0, len(words) - 1)] = draw.either(draw.one(list(apply)), draw.word(), "7")
        return " ".join(words)

    def value(text: str) -> str:
        stack: list[int] = []
        for word in text.split():
            if word in apply:
                if len(stack) < 2:
                    return error
                b, a = stack.pop(), stack.pop()
                stack.append(apply[word](a, b))
            elif word.lstrip("-").isdigit():
                stack.append(int(word))
            else:
                return error
        return str(stack[0]) if len(stack) == 1 else error

    bad = [f"1 {plus}", "1 2", f"{draw.word()}"]
    texts = [*(expression() for _ in range(8)), draw.one(bad)]
    good = [text for text in (expression() for _ in range(12)) if value(text) != error]
    program = f"""
import re, sys
import operator
functions = operator.add, operator.sub, operator.mul, max
apply = dict(zip({symbols}, functions))
def value(line):
    stack = []
    for word in line.split():
        if word in apply:
            b, a = stack.pop(), stack.pop()
            stack.append(apply[word](a, b))
        else:
            stack.append(int(word))
    result, = stack
    return result
code = 0
for line in sys.stdin:
    try:
        print(value(line))
    except (ValueError, IndexError):
        print("{error}")
        code = {code}
sys.exit(code)
"""
    return DrawnTask(
        instruction=f"Write a Python program {name}, run as `python3 {name} < FILE`, that evaluates each line as an "
        "expression in postfix notation (reverse Polish notation) and prints its value. The words of a line are "
        f"integers, which may be negative, and the operators {plus} (sum), {minus} "
        f"(difference), {times} (product) and {larger} (the larger one); for example, `7 2 "
        f"{minus} 3 {times}` is 15. For an invalid line (unknown words, too few values "
        f"for an operator, or not exactly one value at the end) print `{error}` instead and go on; the exit status at "
        f"the end is then {code}, otherwise 0.",
        solution=write_file(name, program),
        checks=[
            *run_case(f"python3 {name}", stdin=lines(texts), stdout=lines(map(value, texts)), exit=code),
            *run_case(f"python3 {name}", stdin=lines(good), stdout=lines(map(value, good))),
        ],
    )


def _options(draw: Draw) -> DrawnTask:
    name, (take, upper, mark) = draw.script("py"), draw.some("abcdknpqstuw", 3)
    code = draw.number(2, 99)

    def result(text: Sequence[str], options: dict[str, str]) -> str:
        found = list(text)[: int(options[take])] if take in options else list(text)
        if upper in options:
            found = found[::-1]
        return lines(f"{options[mark]}{line}" if mark in options else line for line in found)

    cases: list[Case] = []
    for _ in range(5):
        text = [draw.sentence(1, 4) for _ in range(draw.number(5, 12))]
        options = {}
        if draw.chance(0.6):
            options[take] = str(draw.number(1, 8))
        if draw.chance(0.6):
            options[upper] = ""
        if draw.chance(0.6):
            options[mark] = f"{draw.word()} "
        words = [
            word
            for key in draw.some(sorted(options), len(options))
            for word in ((f"-{key}", options[key]) if options[key] else (f"-{key}",))
        ]
        command = shlex.join(["python3", name, *words, "f"])
        cases += run_case(command, files={"f": lines(text)}, stdout=result(text, options))
    unknown = draw.one([letter for letter in "exyz" if letter not in (take, upper, mark)])
    cases += run_case(f"python3 {name} -{unknown} f", files={"f": "a\n"}, stdout="", exit=code)
    cases += run_case(f"python3 {name} missing-file", stdout="", exit=code)
    program = f"""
import getopt, sys
try:
    options, (path,) = getopt.getopt(sys.argv[1:], "{take}:{upper}{mark}:")
    text = open(path).read().splitlines()
except (getopt.GetoptError, ValueError, OSError) as error:
    print(error, file=sys.stderr)
    sys.exit({code})
options = dict(options)
if "-{take}" in options:
    text = text[: int(options["-{take}"])]
if "-{upper}" in options:
    text.reverse()
for line in text:
    print(options.get("-{mark}", "") + line)
"""
    return DrawnTask(
        instruction=f"Write a Python program {name}, run as `python3 {name} [OPTION...] FILE`, that prints the lines "
        f"of FILE. Option -{take} N: only the first N lines. Option -{upper}: in reverse order, the last line first "
        f"(of the lines that -{take} selects). Option -{mark} TEXT: with TEXT before each line. Options may be "
        "combined and come in any order, before FILE. If there is another option or FILE cannot be read, print "
        f"nothing to standard output and end with the exit status {code}.",
        solution=write_file(name, program),
        checks=cases,
    )


def _order(draw: Draw) -> DrawnTask:
    name, (word, code) = draw.script("py"), (draw.either("cycle", "loop", "impossible", "circular"), draw.number(2, 99))
    largest = draw.chance(0.5)

    def graph(has_cycle: bool) -> list[tuple[str, list[str]]]:
        names = draw.words(draw.number(8, 12))
        needs = {item: draw.some(names[:number], draw.number(0, min(2, number))) for number, item in enumerate(names)}
        if has_cycle:
            chain = draw.some(names, 3)
            for first, second in zip(chain, [*chain[1:], chain[0]], strict=True):
                if second not in needs[first]:
                    needs[first].append(second)
        return [(item, needs[item]) for item in draw.some(names, len(names))]

    def order(items: list[tuple[str, list[str]]]) -> list[str]:
        needs, done = dict(items), list[str]()
        while len(done) < len(needs):
            ready = sorted(
                (item for item in needs if item not in done and all(need in done for need in needs[item])),
                reverse=largest,
            )
            if not ready:
                return [word]
            done.append(ready[0])
        return done

    def text(items: list[tuple[str, list[str]]]) -> str:
        return lines(f"{item}: {' '.join(needs)}".rstrip() for item, needs in items)

    program = f"""
import sys
needs = {{}}
for line in sys.stdin:
    item, _, rest = line.partition(":")
    needs[item] = set(rest.split())
done = []
while len(done) < len(needs):
    ready = [item for item in needs if item not in done and needs[item] <= set(done)]
    if not ready:
        print("{word}")
        sys.exit({code})
    done.append({"max" if largest else "min"}(ready))
print(*done, sep="\\n")
"""
    plans = [graph(False), graph(False)]
    broken = graph(True)
    return DrawnTask(
        instruction=f"Write a Python program {name}, run as `python3 {name} < tasks.txt`, that prints the order in "
        "which tasks can be done, one a line. A line of the input is NAME: NEEDED NEEDED..., with the tasks that must "
        "be done before NAME; there may be none, and each task has a line. Whenever several tasks can come next, take "
        f"the alphabetically {'last' if largest else 'first'} one. If there is no such order, print only `{word}` and "
        f"end with the exit status {code}. It is run on other inputs too.",
        files={"tasks.txt": text(plans[0])},
        solution=write_file(name, program),
        checks=[
            *run_case(f"python3 {name}", stdin=text(plans[1]), stdout=lines(order(plans[1]))),
            *run_case(f"python3 {name}", stdin=text(broken), stdout=word, exit=code),
        ],
    )


def _todo(draw: Draw) -> DrawnTask:
    name, store = draw.script("py"), f"{draw.word()}.json"
    add, done, show = draw.either(("add", "done", "list"), ("new", "finish", "show"), ("put", "close", "print"))
    code = draw.number(2, 99)
    open_mark, closed_mark = draw.either(("[ ]", "[x]"), ("-", "+"), ("open", "done"), ("todo:", "ok:"))
    texts: list[tuple[str, bool]] = []
    commands, expected = list[str](), list[str]()

    def shown() -> list[str]:
        return [
            f"{number} {closed_mark if closed else open_mark} {text}" for number, (text, closed) in enumerate(texts, 1)
        ]

    for _ in range(draw.number(10, 16)):
        kind = draw.either(add, add, done, show)
        if kind == add:
            text = draw.sentence(1, 3)
            texts.append((text, False))
            commands.append(f'python3 {name} {add} "{text}"')
            expected.append(str(len(texts)))
        elif kind == done:
            number = draw.number(1, len(texts) + 1)
            commands.append(f"python3 {name} {done} {number} || echo status $?")
            if number > len(texts) or texts[number - 1][1]:
                expected.append(f"status {code}")
            else:
                texts[number - 1] = (texts[number - 1][0], True)
        else:
            commands.append(f"python3 {name} {show}")
            expected += shown()
    commands.append(f"python3 {name} {show}")
    expected += shown()
    hidden = f"{draw.word()}-{draw.number(1000, 9999)}.sh"
    program = f"""
import json, os, sys
items = json.load(open("{store}")) if os.path.exists("{store}") else []
command, *rest = sys.argv[1:]
if command == "{add}":
    items.append([rest[0], False])
    print(len(items))
elif command == "{done}":
    number = int(rest[0])
    if not 1 <= number <= len(items) or items[number - 1][1]:
        sys.exit({code})
    items[number - 1][1] = True
else:
    for number, (text, closed) in enumerate(items, 1):
        print(number, "{closed_mark}" if closed else "{open_mark}", text)
json.dump(items, open("{store}", "w"))
"""
    return DrawnTask(
        instruction=f"Write a Python program {name} that keeps a list of tasks in the file {store} of the current "
        f"folder, between its runs. `python3 {name} {add} TEXT` adds a task and prints its number; numbers start at "
        f"1. `python3 {name} {done} NUMBER` closes a task and prints nothing; if there is no such task or it is "
        f"closed already, it changes nothing and ends with the exit status {code}. `python3 {name} {show}` prints all "
        f"tasks in order as NUMBER MARK TEXT, where MARK is `{open_mark}` for open and `{closed_mark}` for closed "
        f"tasks. A missing {store} is an empty list; leave none behind.",
        solution=write_file(name, program),
        checks=run_case(
            f"bash {hidden}", files={hidden: lines(commands)}, remove=[store], stdout=lines(expected), timeout_s=30
        ),
    )


FAMILY = Family(
    name="scripts",
    summary="Write small programs with arguments, standard input, options, exit statuses and state.",
    kinds={
        1: (_echo, _sequence, _arguments),
        2: (_each_line, _choose, _multiples),
        3: (_statistics, _cipher),
        4: (_calculator, _options),
        5: (_order, _todo),
    },
)
