"""File trees: create, find, move, rename, compare and clean up files and folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from envkit.types import JSON

from .family import Draw, DrawnTask, Family, absent_case, file_case, lines, run_case, tree_case, under, write_file

_SUFFIXES = ("txt", "md", "csv", "log", "json", "cfg", "html", "dat")


def _tree(draw: Draw, low: int, high: int, suffixes: Sequence[str]) -> dict[str, str]:
    """Return the content of files by path, in folders up to three levels deep."""
    folders = [""]
    for name in draw.words(draw.number(4, 8)):
        parent = draw.one(folders)
        folders.append(f"{parent if parent.count('/') < 3 else ''}{name}/")
    names = draw.some([f"{name}.{suffix}" for name in draw.words(60) for suffix in suffixes], draw.number(low, high))
    return {draw.one(folders) + name: draw.sentence(1, 30) + "\n" for name in names}


def _make_folder(draw: Draw) -> DrawnTask:
    first, *rest = draw.words(draw.number(2, 4))
    below = "/".join(rest)
    if draw.chance(0.5):
        return DrawnTask(
            instruction=draw.either(f"Create the folder {first}/{below}.", f"Make a folder {first}/{below}."),
            solution=f"mkdir -p {first}/{below}\n",
            checks=tree_case(first, {below: None}),
        )
    name = f"{draw.word()}{draw.number(1, 99)}.{draw.one(_SUFFIXES)}"
    return DrawnTask(
        instruction=draw.either(
            f"Create an empty file {name} in the folder {first}.",
            f"The folder {first} exists. Create an empty file {name} in it.",
        ),
        setup=f"mkdir {first}\n",
        solution=f"touch {first}/{name}\n",
        checks=tree_case(first, {name: ""}),
    )


def _one_file(draw: Draw) -> DrawnTask:
    folder, new = draw.words(2)
    files = _tree(draw, 3, 8, ("txt", "md"))
    path = draw.one(list(files))
    target = f"{new}{draw.number(1, 99)}.{path.rpartition('.')[2]}"
    verb, command = draw.either(("Delete", "rm"), ("Move", "mv"), ("Copy", "cp"))
    after: dict[str, JSON] = dict(files)
    content = after[path] if verb == "Copy" else after.pop(path)
    if verb != "Delete":
        after[target] = content
    for parent in PurePosixPath(path).parents:
        if str(parent) != "." and not any(other.startswith(f"{parent}/") for other in after):
            after[str(parent)] = None
            break
    to = "" if verb == "Delete" else f" {folder}/{target}"
    return DrawnTask(
        instruction=f"{verb} the file {folder}/{path}{' to' if to else ''}{to}.",
        files=under(folder, files),
        solution=f"{command} {folder}/{path}{to}\n",
        checks=tree_case(folder, after),
    )


def _count_files(draw: Draw) -> DrawnTask:
    folder, out, suffix = draw.word(), draw.output(), draw.one(_SUFFIXES)
    files = _tree(draw, 25, 90, [suffix, *draw.some([other for other in _SUFFIXES if other != suffix], 1)])
    count = sum(path.endswith(f".{suffix}") for path in files)
    return DrawnTask(
        instruction=draw.either(
            f"Count the files below {folder}, in all of its subfolders too, whose names end with .{suffix}. Write the "
            f"number to {out}.",
            f"How many files with the suffix .{suffix} are in {folder} and its subfolders? Write only the number to "
            f"{out}.",
        ),
        files=under(folder, files),
        solution=f"find {folder} -type f -name '*.{suffix}' | wc -l > {out}\n",
        checks=file_case(out, str(count), "words"),
    )


def _collect(draw: Draw) -> DrawnTask:
    folder, target = draw.words(2)
    suffixes = draw.some(_SUFFIXES, 3)
    files = _tree(draw, 12, 30, suffixes)
    found = {path: content for path, content in files.items() if path.endswith(f".{suffixes[0]}")}
    if not found:
        return _collect(draw)
    copies = draw.chance(0.5)
    rest = files if copies else {path: content for path, content in files.items() if path not in found}
    verb, command = ("Copy", "cp") if copies else ("Move", "mv")
    return DrawnTask(
        instruction=f"{verb} all .{suffixes[0]} files below {folder} (in subfolders too) into a new folder {target}, "
        "without their subfolders. No two of them have the same name.",
        files=under(folder, files),
        solution=f"mkdir {target}\nfind {folder} -name '*.{suffixes[0]}' -exec {command} {{}} {target}/ \\;\n",
        checks=[
            *tree_case(target, {PurePosixPath(path).name: content for path, content in found.items()}),
            *(case for path, text in under(folder, rest).items() for case in file_case(path, text, "exact")),
            *absent_case(*(f"{folder}/{path}" for path in found if not copies)),
        ],
    )


def _extreme(draw: Draw) -> DrawnTask:
    folder, out = draw.word(), draw.output()
    sizes = draw.some(range(100, 900), 40)
    files = {path: "x" * sizes.pop() for path in _tree(draw, 22, 40, draw.some(_SUFFIXES, 2))}
    is_largest = draw.chance(0.5)
    path = sorted(files, key=lambda path: len(files[path]), reverse=is_largest)[0]
    return DrawnTask(
        instruction=f"Find the {'largest' if is_largest else 'smallest'} file (by size in bytes) below {folder}, in "
        f"subfolders too. Write its path, which starts with {folder}/, to {out}.",
        files=under(folder, files),
        solution=f"find {folder} -type f -printf '%s %p\\n' | sort -{'r' if is_largest else ''}n | head -n 1 | cut -d' "
        f"' -f2 > {out}\n",
        checks=file_case(out, f"{folder}/{path}"),
    )


def _rename(draw: Draw) -> DrawnTask:
    folder, (old, new, other) = draw.word(), draw.some(_SUFFIXES, 3)
    files = _tree(draw, 12, 30, (old, other))
    if not any(path.endswith(f".{old}") for path in files):
        return _rename(draw)
    prefix = f"{draw.word()}-" if draw.chance(0.5) else ""

    def renamed(path: str) -> str:
        file = PurePosixPath(path)
        return str(file.with_name(f"{prefix}{file.stem}.{new}")) if file.suffix == f".{old}" else path

    return DrawnTask(
        instruction=f"Rename all files below {folder} (in subfolders too) that end with .{old}: they must end with "
        f".{new} instead"
        + (f", and their names must begin with {prefix} in addition" if prefix else "")
        + f". For example, a/b.{old} becomes a/{prefix}b.{new}. Change nothing else.",
        files=under(folder, files),
        solution=f"""find {folder} -type f -name '*.{old}' | while read -r path; do
  name=$(basename "$path" .{old})
  mv "$path" "$(dirname "$path")/{prefix}$name.{new}"
done
""",
        checks=tree_case(folder, {renamed(path): content for path, content in files.items()}),
    )


def _clean(draw: Draw) -> DrawnTask:
    folder, mark = draw.word(), draw.either("~", ".bak", ".tmp", ".swp")
    kept = _tree(draw, 8, 20, draw.some(_SUFFIXES, 2))
    lost = {path + mark: content for path, content in kept.items() if draw.chance(0.4)}
    empty = draw.words(4)
    lost[f"{empty[0]}/{empty[1]}/{draw.word()}{mark}"] = "old\n"
    return DrawnTask(
        instruction=f'Clean up {folder}: delete all files below it whose names end with "{mark}", and then all '
        f"folders below it that "
        "contain no files, not even in their subfolders. Change nothing else.",
        files=under(folder, {**kept, **lost}),
        setup=f"mkdir -p {folder}/{empty[2]}/{empty[3]}\n",
        solution=f"find {folder} -type f -name '*{mark}' -delete\nfind {folder} -mindepth 1 -type d -empty -delete\n",
        checks=tree_case(folder, dict(kept)),
    )


def _large(draw: Draw) -> DrawnTask:
    folder, out, limit = draw.word(), draw.output(), draw.number(50, 150)
    files = {path: "x" * draw.number(1, 250) for path in _tree(draw, 20, 40, draw.some(_SUFFIXES, 2))}
    found = sorted(f"{folder}/{path} {len(text)}" for path, text in files.items() if len(text) > limit)
    return DrawnTask(
        instruction=f"Write a line PATH SIZE to {out} for each file below {folder} (in subfolders too) that is larger "
        f"than {limit} bytes. PATH starts with {folder}/, SIZE is in bytes. Sort the lines by bytes (LC_ALL=C sort).",
        files=under(folder, files),
        solution=f"find {folder} -type f -size +{limit}c -printf '%p %s\\n' | LC_ALL=C sort > {out}\n",
        checks=file_case(out, lines(found)),
    )


def _links(draw: Draw) -> DrawnTask:
    folder, target = draw.words(2)
    suffix, other = draw.some(_SUFFIXES, 2)
    files = _tree(draw, 8, 20, (suffix, other))
    found = [path for path in files if path.endswith(f".{suffix}")]
    if not found:
        return _links(draw)
    return DrawnTask(
        instruction=f"Create a folder {target} with a symbolic link for each .{suffix} file below {folder} (in "
        f"subfolders too). The link has the name of the file without .{suffix}; its target is the relative path of the "
        f"file, such as ../{folder}/a/b.{suffix}.",
        files=under(folder, files),
        solution=f"""mkdir {target}
find {folder} -type f -name '*.{suffix}' | while read -r path; do
  ln -s "../$path" "{target}/$(basename "$path" .{suffix})"
done
""",
        checks=tree_case(
            target,
            {PurePosixPath(path).name.removesuffix(f".{suffix}"): {"link": f"../{folder}/{path}"} for path in found},
        ),
    )


def _organize(draw: Draw) -> DrawnTask:
    source, target = draw.words(2)
    script = draw.script("sh")

    def inbox() -> dict[str, str]:
        found = {}
        for word in draw.words(draw.number(8, 20)):
            date = f"{draw.number(2015, 2025)}-{draw.number(1, 12):02}-{draw.number(1, 28):02}"
            found[f"{date}-{word}.{draw.one(_SUFFIXES)}" if draw.chance(0.8) else f"{word}.{draw.one(_SUFFIXES)}"] = (
                draw.sentence() + "\n"
            )
        return found

    def sorted_in(files: Mapping[str, str]) -> dict[str, JSON]:
        return {
            f"{name[:4]}/{name[5:7]}/{name[11:]}" if name[0] == "2" else f"undated/{name}": text
            for name, text in files.items()
        }

    visible, hidden = inbox(), inbox()
    program = f"""
cd {source}
for name in *; do
  case $name in
  ????-??-??-*) folder=../{target}/$(echo "$name" | cut -c1-4)/$(echo "$name" | cut -c6-7); new=${{name#????-??-??-}} ;;
  *) folder=../{target}/undated; new=$name ;;
  esac
  mkdir -p "$folder"
  mv "$name" "$folder/$new"
done
"""
    return DrawnTask(
        instruction=f"Write a script {script} that moves the files of the folder {source} into a new folder {target}. "
        f"A file YEAR-MONTH-DAY-NAME, such as 2021-03-09-plan.txt, becomes {target}/2021/03/plan.txt; a file without a "
        f"date becomes {target}/undated/NAME. The folder {source} is empty afterwards, but still there. The script is "
        f"run as `bash {script}` in a copy of this folder in which {source} has other files; do not run it here.",
        files=under(source, visible),
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script}",
            remove=[source, target],
            files=under(source, hidden),
            then=[*tree_case(target, sorted_in(hidden)), *tree_case(source, {})],
        ),
    )


def _duplicates(draw: Draw) -> DrawnTask:
    folder, script = draw.word(), f"{draw.word()}.sh"

    def files() -> dict[str, str]:
        texts = [draw.sentence(1, 2) + "\n" for _ in range(10)]
        return {
            path: draw.one(texts) if draw.chance(0.7) else text
            for path, text in _tree(draw, 12, 25, draw.some(_SUFFIXES, 2)).items()
        }

    visible, hidden = files(), files()
    groups: dict[str, list[str]] = {}
    for path in sorted(hidden):
        groups.setdefault(hidden[path], []).append(path)
    found = sorted(" ".join(group) for group in groups.values() if len(group) > 1)
    program = """
cd "$1"
find . -type f | sed 's,^[.]/,,' | LC_ALL=C sort | while read -r path; do
  echo "$(sha256sum < "$path" | cut -d' ' -f1) $path"
done | awk '{ count[$1]++; paths[$1] = paths[$1] (count[$1] > 1 ? " " : "") $2 }
END { for (key in paths) if (count[key] > 1) print paths[key] }' | LC_ALL=C sort
"""
    return DrawnTask(
        instruction=f"Write a script {script} that finds files with equal content. `bash {script} FOLDER` prints a "
        "line for each group of two or more files below FOLDER that have the same content: their paths relative to "
        "FOLDER, separated by spaces. Sort the paths of a line and then the lines by bytes (LC_ALL=C). Names have no "
        f"spaces. The script is run on other folders too; {folder} is an example.",
        files=under(folder, visible),
        solution=write_file(script, program),
        checks=run_case(f"bash {script} hidden-files", files=under("hidden-files", hidden), stdout=lines(found)),
    )


def _mirror(draw: Draw) -> DrawnTask:
    script = draw.script("py")
    added, changed, removed = draw.either(
        ("+", "~", "-"), ("A", "M", "D"), ("new", "changed", "deleted"), ("add", "update", "remove")
    )

    def folders() -> tuple[dict[str, str], dict[str, str]]:
        source = _tree(draw, 10, 18, draw.some(_SUFFIXES, 2))
        target = {
            path: text if draw.chance(0.6) else draw.sentence() + "\n"
            for path, text in source.items()
            if draw.chance(0.7)
        }
        extra = {path: text for path, text in _tree(draw, 2, 6, draw.some(_SUFFIXES, 1)).items() if path not in source}
        return source, {**target, **{f"{draw.word()}-old/{path}": text for path, text in extra.items()}}

    visible, (source, target) = folders(), folders()
    changes = [(path, added if path not in target else changed) for path in source if source[path] != target.get(path)]
    changes += [(path, removed) for path in target if path not in source]
    program = f"""
from pathlib import Path
import shutil, sys
source, target = Path(sys.argv[1]), Path(sys.argv[2])
def files(root):
    return {{str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}}
old, new = files(target), files(source)
for path in sorted(old.keys() | new.keys()):
    if path not in new:
        print("{removed}", path)
    elif path not in old:
        print("{added}", path)
    elif old[path] != new[path]:
        print("{changed}", path)
shutil.rmtree(target)
shutil.copytree(source, target)
"""
    return DrawnTask(
        instruction=f"Write a Python program {script} that makes one folder equal to another. It is run as `python3 "
        f"{script} SOURCE TARGET`, as in `python3 {script} first second`, also on other folders; both exist. "
        "Afterwards TARGET has the same files with the same content as SOURCE and nothing else, no other folders "
        f"either, and SOURCE is unchanged. It prints a line `{added} PATH` for each file that is new in TARGET, "
        f"`{changed} PATH` for each file whose content changed and `{removed} PATH` for each deleted file, with paths "
        "relative to the folders, sorted by PATH.",
        files={**under("first", visible[0]), **under("second", visible[1])},
        solution=write_file(script, program),
        checks=run_case(
            f"python3 {script} h1 h2",
            files={**under("h1", source), **under("h2", target)},
            stdout=lines(f"{kind} {path}" for path, kind in sorted(changes)),
            then=[*tree_case("h1", dict(source)), *tree_case("h2", dict(source))],
        ),
    )


def _flatten(draw: Draw) -> DrawnTask:
    folder, target = draw.words(2)
    script, mark = draw.script("sh"), draw.either("-", "_", ".")

    def files() -> dict[str, str]:
        names = [f"{name}.{draw.one(_SUFFIXES)}" for name in (*draw.words(3), f"{draw.word()} {draw.word()}")]
        places = ["", *(f"{word}/" for word in draw.words(3)), f"{draw.word()} {draw.word()}/{draw.word()}/"]
        return {draw.one(places) + draw.one(names): draw.sentence() + "\n" for _ in range(draw.number(12, 18))}

    visible, hidden = files(), files()
    flat: dict[str, JSON] = {}
    counts: dict[str, int] = {}
    for path in sorted(hidden):
        name = PurePosixPath(path)
        counts[name.name] = number = counts.get(name.name, 0) + 1
        flat[name.name if number == 1 else f"{name.stem}{mark}{number}{name.suffix}"] = hidden[path]
    program = f"""
cd "$1"
mkdir "../$2"
find . -type f | sed 's,^[.]/,,' | LC_ALL=C sort | while IFS= read -r path; do
  name=${{path##*/}}
  new=$name
  number=1
  while [ -e "../$2/$new" ]; do
    number=$((number + 1))
    new="${{name%.*}}{mark}$number.${{name##*.}}"
  done
  cp "$path" "../$2/$new"
done
"""
    return DrawnTask(
        instruction=f"Write a script {script} that copies all files below a folder into one flat folder. It is run as "
        f"`bash {script} FROM TO`, as in `bash {script} {folder} {target}`, also on other folders of the current "
        "folder; TO does not exist before. Take the files in the order of their paths, sorted by bytes (LC_ALL=C). "
        f"The first file with a name NAME.SUFFIX keeps it, the second one becomes NAME{mark}2.SUFFIX, the third one "
        f"NAME{mark}3.SUFFIX, and so on. Paths may have spaces. FROM stays as it is.",
        files=under(folder, visible),
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script} from to",
            files=under("from", hidden),
            then=[*tree_case("to", flat), *tree_case("from", dict(hidden))],
        ),
    )


FAMILY = Family(
    name="trees",
    summary="Create, find, move, rename, compare and clean up files and folders.",
    kinds={
        1: (_make_folder, _one_file),
        2: (_count_files, _collect, _extreme),
        3: (_rename, _clean, _large, _links),
        4: (_organize, _duplicates),
        5: (_mirror, _flatten),
    },
)
