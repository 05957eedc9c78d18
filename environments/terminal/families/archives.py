"""Archives: list, extract, create, repack and compare archives of the formats tar, tar.gz and zip."""

from __future__ import annotations

from typing import Literal

from .family import (
    Draw,
    DrawnTask,
    Family,
    absent_case,
    archive_case,
    file_case,
    lines,
    run_case,
    tree_case,
    under,
    write_file,
)

_Format = Literal["tar", "tar.gz", "zip"]
_FORMATS: tuple[_Format, ...] = ("tar", "tar.gz", "zip")
_SUFFIXES = ("txt", "md", "csv", "log", "json")


def _members(draw: Draw, low: int, high: int) -> dict[str, str]:
    return {path: draw.sentence(1, 20) + "\n" for path in draw.paths(low, high, _SUFFIXES)}


def _pack(archive: str, folder: str) -> str:
    """Return a shell command that makes an archive of a folder's files and deletes the folder."""
    if archive.endswith(".zip"):
        pack = f'(here=$PWD && cd {folder} && python3 -m zipfile -c "$here/{archive}" *)'
    else:
        pack = f"tar -c{'z' if archive.endswith('gz') else ''}f {archive} -C {folder} $(ls {folder})"
    return f"{pack}\nrm -r {folder}\n"


def _extract(archive: str, folder: str) -> str:
    if archive.endswith(".zip"):
        return f"python3 -m zipfile -e {archive} {folder}\n"
    return f"mkdir -p {folder}\ntar -xf {archive} -C {folder}\n"


def _unpack(draw: Draw) -> DrawnTask:
    archive, folder = f"{draw.word()}.{draw.either('tar', 'tar.gz', 'tar.gz', 'zip')}", draw.word()
    members = _members(draw, 3, 9)
    here = draw.chance(0.4)
    if here:
        members = under(folder, members)
    return DrawnTask(
        instruction=draw.either(f"Extract {archive} here.", f"Unpack {archive} in the current folder.")
        if here
        else draw.either(
            f"Extract {archive} into the new folder {folder}.",
            f"Create the folder {folder} and unpack {archive} into it.",
        ),
        files=under("packed", members),
        setup=_pack(archive, "packed"),
        solution=_extract(archive, "." if here else folder),
        checks=tree_case(
            folder, {path.removeprefix(f"{folder}/") if here else path: text for path, text in members.items()}
        ),
    )


def _create(draw: Draw) -> DrawnTask:
    folder, name, format = draw.word(), draw.word(), draw.one(_FORMATS[:2])
    members = under(folder, _members(draw, 3, 9))
    return DrawnTask(
        instruction=draw.either(
            f"Pack the folder {folder} into {name}.{format}.",
            f"Create the archive {name}.{format} with the folder {folder} and its files.",
        ),
        files=members,
        solution=f"tar -c{'z' if format == 'tar.gz' else ''}f {name}.{format} {folder}\n",
        checks=archive_case(f"{name}.{format}", format, members),
    )


def _gzip(draw: Draw) -> DrawnTask:
    name, out = f"{draw.word()}.log", draw.output()
    text = [draw.sentence() for _ in range(draw.number(20, 300))]
    counts = not draw.chance(0.5)
    return DrawnTask(
        instruction=f"How many lines does the compressed file {name}.gz have? Write the number to {out}."
        if counts
        else f"Decompress {name}.gz and write its content to {out}.",
        files={name: lines(text)},
        setup=f"gzip {name}\n",
        solution=f"gzip -dc {name}.gz{' | wc -l' if counts else ''} > {out}\n",
        checks=file_case(out, str(len(text)), "words") if counts else file_case(out, lines(text), "exact"),
    )


def _list(draw: Draw) -> DrawnTask:
    archive, out, suffix = f"{draw.word()}.{draw.one(_FORMATS)}", draw.output(), draw.one(_SUFFIXES)
    members = _members(draw, 25, 60)
    found = sorted(path for path in members if path.endswith(f".{suffix}"))
    if not found:
        return _list(draw)
    listed = (
        f"python3 -m zipfile -l {archive} | awk 'NR > 1 {{ print $1 }}'"
        if archive.endswith("zip")
        else f"tar -tf {archive}"
    )
    return DrawnTask(
        instruction=f"Write the names of all .{suffix} files in {archive}, with their folders, to {out}, one a line, "
        "sorted by bytes (LC_ALL=C sort).",
        files=under("packed", members),
        setup=_pack(archive, "packed"),
        solution=f"{listed} | grep '[.]{suffix}$' | LC_ALL=C sort > {out}\n",
        checks=file_case(out, lines(found)),
    )


def _one_member(draw: Draw) -> DrawnTask:
    archive, out = f"{draw.word()}.{draw.one(_FORMATS)}", draw.output()
    members = _members(draw, 15, 30)
    path = draw.one(list(members))
    return DrawnTask(
        instruction=f"Write the content of the file {path} in the archive {archive} to {out}. Leave no other extracted "
        "files in this folder.",
        files=under("packed", members),
        setup=_pack(archive, "packed"),
        solution=f"{_extract(archive, '/tmp/extracted.$$')}cat /tmp/extracted.$$/{path} > {out}\nrm -r "
        "/tmp/extracted.$$\n",
        checks=[
            *file_case(out, members[path], "exact"),
            *absent_case(*(other.split("/")[0] for other in members if other != out)),
        ],
    )


def _some_packed(draw: Draw) -> DrawnTask:
    folder, archive, format = draw.word(), draw.word(), draw.one(_FORMATS[:2])
    members = _members(draw, 10, 20)
    suffix = draw.one([path.rpartition(".")[2] for path in members])
    excluded = draw.chance(0.5)
    found = {path: text for path, text in members.items() if path.endswith(f".{suffix}") != excluded}
    if not found:
        return _some_packed(draw)
    return DrawnTask(
        instruction=f"Create {archive}.{format} with all files below {folder} {'except' if excluded else 'that are'} "
        f".{suffix} files. The names in the archive are relative to {folder}, such as {next(iter(found))}, without "
        f"{folder}/ before them.",
        files=under(folder, members),
        solution=f"cd {folder}\nfind . -type f {'! ' if excluded else ''}-name '*.{suffix}' | tar "
        f"-c{'z' if format == 'tar.gz' else ''}f ../{archive}.{format} -T -\n",
        checks=archive_case(f"{archive}.{format}", format, found),
    )


def _convert(draw: Draw) -> DrawnTask:
    (source, target), (old, new) = draw.words(2), draw.some(_FORMATS, 2)
    members = _members(draw, 8, 16)
    prefix = draw.word() if draw.chance(0.5) else ""
    packed = under(prefix, members) if prefix else members
    into = f"/tmp/repack.$$/{prefix}" if prefix else "/tmp/repack.$$"
    pack = (
        f'python3 -m zipfile -c "$OLDPWD/{target}.zip" *'
        if new == "zip"
        else f'tar -c{"z" if new == "tar.gz" else ""}f "$OLDPWD/{target}.{new}" *'
    )
    return DrawnTask(
        instruction=f"Convert the archive {source}.{old} to {target}.{new}, with the same files"
        + (f" in a folder {prefix}: a/b.txt becomes {prefix}/a/b.txt." if prefix else " under the same names.")
        + f" Leave {source}.{old} as it is.",
        files=under("packed", members),
        setup=_pack(f"{source}.{old}", "packed"),
        solution=f"mkdir -p {into}\n{_extract(f'{source}.{old}', into)}cd /tmp/repack.$$\n{pack}\nrm -r "
        "/tmp/repack.$$\n",
        checks=[*archive_case(f"{target}.{new}", new, packed), *archive_case(f"{source}.{old}", old, members)],
    )


def _nested(draw: Draw) -> DrawnTask:
    outer, out = f"{draw.word()}.tar.gz", draw.output()
    inner = {f"{name}.{draw.one(_FORMATS)}": _members(draw, 4, 8) for name in draw.words(4)}
    archive = draw.one(list(inner))
    path = draw.one(list(inner[archive]))
    secret = f"{draw.word()}-{draw.number(1000, 99999)}"
    inner[archive][path] += f"code: {secret}\n"
    files = {
        f"outer/{name}-files/{member}": text for name, members in inner.items() for member, text in members.items()
    }
    asks_path = draw.chance(0.5)
    return DrawnTask(
        instruction=f"The archive {outer} has other archives in it. One file in one of them has a line starting with "
        "`code: `. Write "
        + (
            f"ARCHIVE PATH to {out}: the name of the inner archive and the path of the file in it, separated by a "
            "space."
            if asks_path
            else f"the text after `code: ` to {out}."
        ),
        files=files,
        setup="cd outer\n"
        + "".join(_pack(name, f"{name}-files") for name in inner)
        + f"cd ..\ntar -czf {outer} -C outer {' '.join(inner)}\nrm -r outer\n",
        solution=f"mkdir /tmp/nested.$$\ntar -xf {outer} -C /tmp/nested.$$\nhere=$PWD\ncd /tmp/nested.$$\n"
        + "".join(_extract(name, f"{name}-files") for name in inner)
        + (
            f"grep -rl '^code: ' *-files | sed 's,-files/, ,' > $here/{out}\n"
            if asks_path
            else f"grep -rh '^code: ' *-files | cut -d' ' -f2 > $here/{out}\n"
        ),
        checks=file_case(out, f"{archive} {path}" if asks_path else secret, "words"),
    )


def _compare(draw: Draw) -> DrawnTask:
    program_name = f"{draw.word()}.py"
    added, changed, removed = draw.either(("+", "~", "-"), ("A", "M", "D"), ("new", "changed", "deleted"))

    def pair() -> tuple[dict[str, str], dict[str, str]]:
        old = _members(draw, 10, 16)
        new = {
            path: text if draw.chance(0.6) else draw.sentence() + "\n"
            for path, text in old.items()
            if draw.chance(0.75)
        }
        return old, {**new, **{path: text for path, text in _members(draw, 2, 5).items() if path not in old}}

    visible, (old, new) = pair(), pair()
    found = [
        f"{added if path not in old else removed if path not in new else changed} {path}"
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    ]
    program = f"""
import sys, tarfile
def files(path):
    with tarfile.open(path) as archive:
        return {{member.name: archive.extractfile(member).read() for member in archive if member.isfile()}}
old, new = files(sys.argv[1]), files(sys.argv[2])
for path in sorted(old.keys() | new.keys()):
    if path not in old:
        print("{added}", path)
    elif path not in new:
        print("{removed}", path)
    elif old[path] != new[path]:
        print("{changed}", path)
"""
    hidden = f"{draw.word()}-{draw.number(1000, 9999)}"
    driver = _pack("a.tar.gz", "$1/old") + _pack("b.tar", "$1/new") + f"python3 {program_name} a.tar.gz b.tar\n"
    return DrawnTask(
        instruction=f"Write a Python program {program_name} that compares two archives (tar or tar.gz). It is run as "
        f"`python3 {program_name} OLD NEW`, as in `python3 {program_name} old.tar.gz new.tar.gz`, and prints a line "
        f"`{added} PATH` for each file that is only in NEW, `{removed} PATH` for each file that is only in OLD, and "
        f"`{changed} PATH` for each file whose content differs, sorted by PATH. It is run on other archives too.",
        files={**under("first", visible[0]), **under("second", visible[1])},
        setup=_pack("old.tar.gz", "first") + _pack("new.tar.gz", "second"),
        solution=write_file(program_name, program),
        checks=run_case(
            f"bash {hidden}.sh {hidden}",
            files={f"{hidden}.sh": driver, **under(f"{hidden}/old", old), **under(f"{hidden}/new", new)},
            stdout=lines(found),
        ),
    )


def _backup(draw: Draw) -> DrawnTask:
    script, (folder, store), keep = draw.script("sh"), draw.words(2), draw.number(2, 4)
    members, rounds = _members(draw, 4, 8), keep + draw.number(1, 2)
    texts = [draw.sentence() + "\n" for _ in range(rounds)]
    hidden = f"{draw.word()}-{draw.number(1000, 9999)}"
    changing = f"{draw.word()}{draw.number(1, 9)}.txt"
    driver = (
        "".join(f"printf '%s\\n' '{text.strip()}' > {folder}/{changing}\nbash {script} || exit 1\n" for text in texts)
        + f"ls {store}\n"
    )
    program = f"""
mkdir -p {store}
last=$(ls {store} | sed -n 's/^backup-0*\\([0-9]*\\)[.]tar[.]gz$/\\1/p' | sort -n | tail -n 1)
tar -czf {store}/backup-$(printf %03d $((${{last:-0}} + 1))).tar.gz {folder}
ls {store}/backup-*.tar.gz | sort | head -n -{keep} | xargs -r rm
"""
    names = [f"backup-{number:03}.tar.gz" for number in range(rounds - keep + 1, rounds + 1)]
    return DrawnTask(
        instruction=f"Write a script {script}, run as `bash {script}`, that packs the folder {folder} into "
        f"{store}/backup-NNN.tar.gz. NNN is 001 for the first backup and then one more than the highest number of the "
        f"backups in {store}, always with three digits. The names in the archive start with {folder}/. The script "
        f"creates the folder {store} if it does not exist, and keeps only the {keep} newest backups (those with the "
        "highest numbers): it deletes the older ones. It is run several times on other files; when you finish, there "
        f"must be no folder {store}.",
        files=under(folder, members),
        solution=write_file(script, program),
        checks=[
            *absent_case(store),
            *run_case(
                f"bash {hidden}.sh",
                files={f"{hidden}.sh": driver},
                stdout=lines(names),
                timeout_s=30,
                then=[
                    case
                    for name, text in zip(names, texts[-keep:], strict=True)
                    for case in archive_case(f"{store}/{name}", "tar.gz", under(folder, {**members, changing: text}))
                ],
            ),
        ],
    )


def _merge(draw: Draw) -> DrawnTask:
    program_name, count = draw.script("py"), draw.number(3, 4)
    first_wins = draw.chance(0.5)
    as_zip = draw.chance(0.5)
    new = "zip" if as_zip else "tar.gz"

    def parts() -> list[dict[str, str]]:
        names = [
            f"{word}/{other}.{draw.one(_SUFFIXES)}" for word, other in zip(draw.words(10), draw.words(10), strict=True)
        ]
        return [{name: draw.sentence() + "\n" for name in draw.some(names, draw.number(4, 7))} for _ in range(count)]

    visible, hidden = parts(), parts()
    merged: dict[str, str] = {}
    for part in hidden:
        merged = {**part, **merged} if first_wins else {**merged, **part}
    conflicts = sorted(path for path in merged if len({part[path] for part in hidden if path in part}) > 1)
    save = (
        """with zipfile.ZipFile(sys.argv[1], "w") as archive:
    for path, content in merged.items():
        archive.writestr(path, content)"""
        if as_zip
        else """with tarfile.open(sys.argv[1], "w:gz") as archive:
    for path, content in merged.items():
        member = tarfile.TarInfo(path)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))"""
    )
    program = f"""
import io, sys, tarfile, zipfile
def files(path):
    if path.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            return {{name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}}
    with tarfile.open(path) as archive:
        return {{member.name: archive.extractfile(member).read() for member in archive if member.isfile()}}
merged, seen = {{}}, {{}}
for path in sys.argv[2:]:
    for name, content in files(path).items():
        seen.setdefault(name, set()).add(content)
        if {"name not in merged" if first_wins else "True"}:
            merged[name] = content
{save}
for name in sorted(seen):
    if len(seen[name]) > 1:
        print(name)
"""
    names = [f"part{number}.{draw.one(_FORMATS)}" for number in range(1, count + 1)]

    def files(of: list[dict[str, str]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, part in zip(names, of, strict=True):
            found.update(under(f"{name}-files", part))
        return found

    place = f"{draw.word()}-{draw.number(1000, 9999)}"
    driver = (
        "cd $1\n"
        + "".join(_pack(name, f"{name}-files") for name in names)
        + f"python3 ../{program_name} merged.{new} {' '.join(names)}\n"
    )
    return DrawnTask(
        instruction=f"Write a Python program {program_name}, run as `python3 {program_name} NEW ARCHIVE...`, as in "
        f"`python3 {program_name} all.{new} {' '.join(names)}`, that makes an archive NEW with the files of all other "
        f"archives. Their formats are tar, tar.gz and zip, as their suffixes say; NEW is a .{new} file. If a path is "
        f"in several archives, NEW has its content from the {'first' if first_wins else 'last'} of them. The program "
        "prints the paths that are in several archives with different contents, one a line, sorted. It is run on "
        "other archives too.",
        files=files(visible),
        setup="".join(_pack(name, f"{name}-files") for name in names),
        solution=write_file(program_name, program),
        checks=run_case(
            f"bash {place}.sh {place}",
            files={f"{place}.sh": driver, **under(place, files(hidden))},
            stdout=lines(conflicts),
            timeout_s=30,
            then=archive_case(f"{place}/merged.{new}", "zip" if as_zip else "tar.gz", merged),
        ),
    )


FAMILY = Family(
    name="archives",
    summary="List, extract, create, repack and compare archives of the formats tar, tar.gz and zip.",
    kinds={
        1: (_unpack, _create, _gzip),
        2: (_list, _one_member, _some_packed),
        3: (_convert, _nested),
        4: (_compare,),
        5: (_backup, _merge),
    },
)
