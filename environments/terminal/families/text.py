"""Text processing: count, select, rewrite and summarize the lines of text files."""

from __future__ import annotations

from collections import Counter

from .family import Draw, DrawnTask, Family, file_case, lines, run_case, write_file


def _prose(draw: Draw, low: int = 40, high: int = 160) -> list[str]:
    return [draw.sentence() for _ in range(draw.number(low, high))]


def _count_lines(draw: Draw) -> DrawnTask:
    text, data, out = _prose(draw, 20, 400), f"{draw.word()}.txt", draw.output()
    unit, option, count = draw.either(
        ("lines", "-l", len(text)),
        ("words", "-w", sum(len(line.split()) for line in text)),
        ("bytes", "-c", len(lines(text))),
    )
    return DrawnTask(
        instruction=draw.either(
            f"Write the number of {unit} of {data} to {out}.",
            f"Count the {unit} of {data}. Write only the number to {out}.",
            f"How many {unit} does {data} have? Write the number to {out}.",
        ),
        files={data: lines(text)},
        solution=f"wc {option} < {data} > {out}\n",
        checks=file_case(out, str(count), "words"),
    )


def _one_line(draw: Draw) -> DrawnTask:
    text, data, out = _prose(draw, 20, 200), f"{draw.word()}.txt", draw.output()
    number = draw.number(2, len(text) - 1)
    return DrawnTask(
        instruction=draw.either(
            f"Write line {number} of {data} to {out}. The first line is line 1.",
            f"Copy line number {number} of {data} (counted from 1) to the file {out}.",
        ),
        files={data: lines(text)},
        solution=f"sed -n {number}p {data} > {out}\n",
        checks=file_case(out, text[number - 1]),
    )


def _some_lines(draw: Draw) -> DrawnTask:
    text, data, out = _prose(draw, 40, 120), f"{draw.word()}.txt", draw.output()
    count = draw.number(3, 20)
    what, command, found = draw.either(
        (f"the first {count} lines of {data}", f"head -n {count}", text[:count]),
        (f"the last {count} lines of {data}", f"tail -n {count}", text[-count:]),
        (f"the lines of {data}, sorted alphabetically,", "LC_ALL=C sort", sorted(text)),
        (f"the lines of {data} in reverse order (the last one first)", "tac", text[::-1]),
        (f"the text of {data} in upper case", "tr a-z A-Z <", [line.upper() for line in text]),
    )
    return DrawnTask(
        instruction=draw.either(f"Write {what} to {out}.", f"Write {what} to the file {out}."),
        files={data: lines(text)},
        solution=f"{command} {data} > {out}\n",
        checks=file_case(out, lines(found)),
    )


def _matching(draw: Draw) -> DrawnTask:
    text, data, out, word = _prose(draw), f"{draw.word()}.txt", draw.output(), draw.word()
    for _ in range(draw.number(6, 60)):
        text.insert(draw.number(0, len(text)), f"{draw.sentence(1, 4)} {word} {draw.sentence(1, 4)}")
    is_kept = draw.chance(0.5)
    found = [line for line in text if (word in line) == is_kept]
    does, option = ("contain", "") if is_kept else ("do not contain", "-v ")
    if draw.chance(0.5):
        instruction = f'Write the number of lines of {data} that {does} "{word}" to {out}.'
        option, check = option + "-c ", file_case(out, str(len(found)), "words")
    else:
        instruction = f'Write the lines of {data} that {does} "{word}" to {out}, in their order.'
        check = file_case(out, lines(found))
    return DrawnTask(
        instruction=instruction,
        files={data: lines(text)},
        solution=f"grep {option}{word} {data} > {out}\n",
        checks=check,
    )


def _column(draw: Draw) -> DrawnTask:
    separator = draw.either(":", ",", ";", "|")
    width = draw.number(3, 6)
    rows = [[*draw.words(width - 1), str(draw.number(1, 9999))] for _ in range(draw.number(20, 80))]
    data, out, column = f"{draw.word()}.dat", draw.output(), draw.number(2, width)
    unique = draw.chance(0.5)
    found = [row[column - 1] for row in rows]
    return DrawnTask(
        instruction=f'The fields of each line of {data} are separated by "{separator}". Write field {column} of each '
        + (f"line to {out}, sorted by bytes (LC_ALL=C) and without duplicates." if unique else f"line to {out}."),
        files={data: lines(separator.join(row) for row in rows)},
        solution=f"cut -d'{separator}' -f{column} {data}{' | LC_ALL=C sort -u' if unique else ''} > {out}\n",
        checks=file_case(out, lines(sorted(set(found)) if unique else found)),
    )


def _replace(draw: Draw) -> DrawnTask:
    old, new = draw.words(2)
    text, data = _prose(draw), f"{draw.word()}.md"
    for _ in range(draw.number(10, 40)):
        text[draw.number(0, len(text) - 1)] = f"{draw.word()} {old} {draw.word()} {old}{draw.either('', 's', 'like')}"
    whole = draw.chance(0.5)
    replaced = [
        " ".join(new if word == old else word for word in line.split()) if whole else line.replace(old, new)
        for line in text
    ]
    pattern = rf"\b{old}\b" if whole else old
    return DrawnTask(
        instruction=f'Replace every {"whole word" if whole else "occurrence of"} "{old}" in {data} by "{new}", in '
        f"place."
        + (
            f' Longer words that contain "{old}" stay as they are.' if whole else " Replace it inside longer words too."
        ),
        files={data: lines(text)},
        solution=f"sed -i 's/{pattern}/{new}/g' {data}\n",
        checks=file_case(data, lines(replaced)),
    )


def _frequent(draw: Draw) -> DrawnTask:
    chosen = draw.words(40)
    text = [" ".join(draw.one(chosen[: draw.number(1, 40)]) for _ in range(8)) for _ in range(draw.number(40, 100))]
    data, out, top = f"{draw.word()}.txt", draw.output(), draw.number(4, 12)
    counts = sorted(Counter(" ".join(text).split()).items(), key=lambda item: (-item[1], item[0]))[:top]
    return DrawnTask(
        instruction=f"Find the {top} most frequent words of {data}. Write them to {out}, one a line, as COUNT WORD "
        "with one space between, the most frequent first. Sort words with the same count alphabetically.",
        files={data: lines(text)},
        solution=f"tr -s ' ' '\\n' < {data} | LC_ALL=C sort | uniq -c | LC_ALL=C sort -k1,1nr -k2,2 | head -n {top} | "
        f"awk '{{print $1, $2}}' > {out}\n",
        checks=file_case(out, lines(f"{count} {word}" for word, count in counts)),
    )


def _difference(draw: Draw) -> DrawnTask:
    pool = [f"{draw.word()}-{draw.number(1, 999)}" for _ in range(90)]
    first, second = draw.some(pool, 60), draw.some(pool, 60)
    left, right = draw.words(2)
    out = draw.output()
    common = draw.chance(0.5)
    found = [item for item in first if (item in second) == common]
    return DrawnTask(
        instruction=f"Write the lines of {left}.list that are {'also' if common else 'not'} in {right}.list to {out}, "
        f"in the order of {left}.list.",
        files={f"{left}.list": lines(first), f"{right}.list": lines(second)},
        solution=f"grep -Fx{'' if common else 'v'} -f {right}.list {left}.list > {out}\n",
        checks=file_case(out, lines(found)),
    )


def _distinct(draw: Draw) -> DrawnTask:
    pool = [draw.sentence(1, 3) for _ in range(30)]
    text = [draw.one(pool) + " " * draw.number(0, 2) for _ in range(draw.number(50, 90))]
    data, out = f"{draw.word()}.txt", draw.output()
    found = list(dict.fromkeys(line.rstrip() for line in text))
    return DrawnTask(
        instruction=f"Write the lines of {data} to {out}, without spaces at their ends and without duplicates: of "
        "equal lines, keep the first. Number them: each line of the output is NUMBER: TEXT, such as 1: "
        + found[0]
        + ".",
        files={data: lines(text)},
        solution=f"sed 's/ *$//' {data} | awk '!seen[$0]++ {{print ++n \": \" $0}}' > {out}\n",
        checks=file_case(out, lines(f"{number}: {line}" for number, line in enumerate(found, 1))),
    )


def _blocks(draw: Draw) -> DrawnTask:
    keys = draw.words(3)
    script, mark = draw.script("sh"), draw.either(",", ";", "|")

    def records() -> list[dict[str, str]]:
        found = []
        for _ in range(draw.number(8, 25)):
            present = [key for key in draw.some(keys, 3) if key == keys[0] or draw.chance(0.75)]
            found.append({key: draw.sentence(1, 3) for key in present})
        return found

    def text(found: list[dict[str, str]]) -> str:
        return "\n".join(lines(f"{key}: {value}" for key, value in record.items()) for record in found)

    visible, hidden = records(), records()
    table = [keys, *([record.get(key, "-") for key in keys] for record in hidden)]
    program = f"""
awk -v RS= -F'\\n' 'BEGIN {{ print "{mark.join(keys)}" }} {{
  split("", value)
  for (i = 1; i <= NF; i++) {{ at = index($i, ": "); value[substr($i, 1, at - 1)] = substr($i, at + 2) }}
  line = ""
  n = split("{" ".join(keys)}", names, " ")
  for (i = 1; i <= n; i++) line = line (i > 1 ? "{mark}" : "") (names[i] in value ? value[names[i]] : "-")
  print line
}}' "$1"
"""
    return DrawnTask(
        instruction=f"The file records.txt has records of lines KEY: VALUE, separated by empty lines. Write a script "
        f"{script} that prints such a file as a table: first the line {mark.join(keys)}, then a line for each record "
        f'with these values in this order, separated by "{mark}". The keys of a record may come in any order; a '
        f"missing value is printed as -. It is run as `bash {script} FILE`, also on other files.",
        files={"records.txt": text(visible)},
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script} hidden.txt",
            files={"hidden.txt": text(hidden)},
            stdout=lines(mark.join(row) for row in table),
        ),
    )


def _joined(draw: Draw) -> DrawnTask:
    left, right = draw.words(2)
    script = draw.script("sh")

    def tables() -> tuple[dict[str, str], list[tuple[str, int]]]:
        names = {f"{draw.word()[:2]}{draw.number(10, 99)}": draw.word() for _ in range(draw.number(6, 15))}
        ids = [*names, f"zz{draw.number(10, 99)}"]
        return names, [(draw.one(ids), draw.number(1, 500)) for _ in range(draw.number(20, 60))]

    def files(names: dict[str, str], amounts: list[tuple[str, int]]) -> dict[str, str]:
        return {
            f"{left}.txt": lines(f"{id} {name}" for id, name in names.items()),
            f"{right}.txt": lines(f"{amount} {id}" for id, amount in amounts),
        }

    visible, hidden = tables(), tables()
    names, amounts = hidden
    totals: Counter[str] = Counter()
    for id, amount in amounts:
        totals[names.get(id, "unknown")] += amount
    program = f"""
awk 'NR == FNR {{ name[$1] = $2; next }} {{ total[$2 in name ? name[$2] : "unknown"] += $1 }}
END {{ for (key in total) print key, total[key] }}' {left}.txt {right}.txt | LC_ALL=C sort
"""
    return DrawnTask(
        instruction=f"The lines of {left}.txt are ID NAME; different ids may have the same name. The lines of "
        f"{right}.txt are AMOUNT ID. Write a script {script} that reads both files from the current folder and prints "
        "a line NAME TOTAL for each name that has amounts, sorted by name, with the total of its amounts. Amounts "
        f"whose id is not in {left}.txt count for the name unknown. It is run as `bash {script}`, also with other "
        "files.",
        files=files(*visible),
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script}", files=files(*hidden), stdout=lines(f"{name} {totals[name]}" for name in sorted(totals))
        ),
    )


def _index(draw: Draw) -> DrawnTask:
    script, stop = draw.script("sh"), f"{draw.word()}.stop"
    least = draw.number(2, 3)

    def files() -> dict[str, str]:
        chosen = draw.words(30)
        text = []
        for _ in range(draw.number(15, 40)):
            words = [draw.one(chosen) for _ in range(draw.number(0, 7))]
            words = [word.capitalize() if draw.chance(0.3) else word for word in words]
            text.append(" ".join(word + draw.either("", "", ",", ".", "!") for word in words))
        return {"book.txt": lines(text), stop: lines(draw.some(chosen, 6))}

    visible, hidden = files(), files()
    found: dict[str, list[int]] = {}
    for number, line in enumerate(hidden["book.txt"].splitlines(), 1):
        for word in line.lower().split():
            numbers = found.setdefault(word.strip(",.!"), [])
            if number not in numbers:
                numbers.append(number)
    ignored = hidden[stop].split()
    index = [
        f"{word}: {','.join(map(str, found[word]))}"
        for word in sorted(found)
        if len(found[word]) >= least and word not in ignored
    ]
    program = f"""
tr A-Z a-z < "$1" | tr -d '.,!' | awk -v stop="$2" '
BEGIN {{ while ((getline word < stop) > 0) ignored[word] = 1 }}
{{ for (i = 1; i <= NF; i++) if (!($i in ignored) && last[$i] != NR) {{
     lines[$i] = lines[$i] (last[$i] ? "," : "") NR; last[$i] = NR; count[$i]++ }} }}
END {{ for (word in lines) if (count[word] >= {least}) print word ": " lines[word] }}' | LC_ALL=C sort -t: -k1,1
"""
    return DrawnTask(
        instruction=f"Write a script {script} that prints an index of a text. It is run as `bash {script} TEXT STOP`, "
        f"as in `bash {script} book.txt {stop}`, also with other files. Words are separated by blanks. Upper and lower "
        "case are equal, and the characters , . ! are not part of words. Print a line WORD: NUMBERS, such as "
        f"{draw.word()}: 3,8,21, for each word (in lower case) that is on at least {least} different lines: the "
        "numbers of these lines in ascending order, each once. Words that are lines of the file STOP are left out. "
        "Sort the index by word.",
        files=visible,
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script} t.txt s.txt",
            files={"t.txt": hidden["book.txt"], "s.txt": hidden[stop]},
            stdout=lines(index),
        ),
    )


def _edits(draw: Draw) -> DrawnTask:
    script = draw.script("sh")

    def example() -> tuple[list[str], list[str], list[str]]:
        text = [draw.sentence(2, 4) for _ in range(draw.number(20, 40))]
        numbers = draw.some(range(1, len(text) + 1), draw.number(6, 12))
        edits, result = [], [[line] for line in text]
        for number in numbers:
            kind, words = draw.either("d", "c", "a", "i"), draw.sentence(2, 4)
            edits.append(f"{number} d" if kind == "d" else f"{number} {kind} {words}")
            result[number - 1] = {
                "d": [],
                "c": [words],
                "a": [text[number - 1], words],
                "i": [words, text[number - 1]],
            }[kind]
        return text, edits, [line for part in result for line in part]

    visible, hidden = example(), example()
    program = """
awk 'NR == FNR { kind[$1] = $2; text[$1] = substr($0, length($1) + 4); next }
kind[FNR] == "d" { next }
kind[FNR] == "c" { print text[FNR]; next }
kind[FNR] == "i" { print text[FNR] }
{ print }
kind[FNR] == "a" { print text[FNR] }' "$2" "$1"
"""
    return DrawnTask(
        instruction=f"Write a script {script} that applies edits to a text and prints the result. It is run as `bash "
        f"{script} TEXT EDITS`, also on other files; text.txt and edits.txt are examples. A line of EDITS is `N d` "
        "(delete line N), `N c WORDS` (replace line N by WORDS), `N a WORDS` (add a line WORDS after line N) or `N i "
        "WORDS` (insert a line WORDS before line N). N always counts the lines of the original text, from 1. The "
        "edits are in any order; no two of them have the same N.",
        files={"text.txt": lines(visible[0]), "edits.txt": lines(visible[1])},
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script} in ed", files={"in": lines(hidden[0]), "ed": lines(hidden[1])}, stdout=lines(hidden[2])
        ),
    )


FAMILY = Family(
    name="text",
    summary="Count, select, rewrite and summarize the lines of text files.",
    kinds={
        1: (_count_lines, _one_line, _some_lines),
        2: (_matching, _column, _replace),
        3: (_frequent, _difference, _distinct),
        4: (_blocks, _joined),
        5: (_index, _edits),
    },
)
