"""Permissions: read, set and audit the permission bits of files and folders.

All files stay readable for their owner, since the verifier collects them with the rights of the agent.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from .family import Draw, DrawnTask, Family, file_case, lines, modes_case, run_case, under, write_file

_CLASSES = {"the owner": "u", "the group": "g", "other users (neither owner nor group)": "o"}
_BITS = {"read": ("r", 4), "write": ("w", 2), "execute": ("x", 1)}
_SUFFIXES = ("txt", "sh", "cfg", "key", "log", "py", "html", "pem")


def _mode(draw: Draw) -> str:
    """Return a mode with which the owner can read."""
    return f"{draw.either(4, 5, 6, 7)}{draw.number(0, 7)}{draw.number(0, 7)}"


def _paths(draw: Draw, low: int, high: int, suffixes: Sequence[str] = _SUFFIXES) -> list[str]:
    return list(draw.paths(low, high, suffixes))


def _chmod(modes: Mapping[str, str]) -> str:
    return "".join(f"chmod {mode} {path}\n" for path, mode in modes.items())


def _files(paths: Iterable[str], draw: Draw) -> dict[str, str]:
    return {path: draw.sentence() + "\n" for path in paths}


def _set_mode(draw: Draw) -> DrawnTask:
    path, before = f"{draw.word()}{draw.number(1, 99)}.{draw.one(_SUFFIXES)}", _mode(draw)
    mode = _mode(draw)
    if mode == before:
        return _set_mode(draw)
    return DrawnTask(
        instruction=draw.either(
            f"Set the permissions of {path} to {mode} (octal).",
            f"Change the mode of the file {path} to {mode}.",
        ),
        files=_files([path], draw),
        setup=f"chmod {before} {path}\n",
        solution=f"chmod {mode} {path}\n",
        checks=modes_case({path: mode}),
    )


def _change_bit(draw: Draw) -> DrawnTask:
    path, before = f"{draw.word()}{draw.number(1, 99)}.{draw.one(_SUFFIXES)}", _mode(draw)
    (who, letter), (bit, (sign, value)) = draw.one(list(_CLASSES.items())), draw.one(list(_BITS.items()))
    at = "ugo".index(letter)
    digits = [int(digit) for digit in before]
    is_given = not digits[at] & value
    digits[at] ^= value
    if not digits[0] & 4:
        return _change_bit(draw)
    return DrawnTask(
        instruction=f"{'Give' if is_given else 'Do not give'} {who} the {bit} permission for {path}. Leave its other "
        "permissions as they are.",
        files=_files([path], draw),
        setup=f"chmod {before} {path}\n",
        solution=f"chmod {letter}{'+' if is_given else '-'}{sign} {path}\n",
        checks=modes_case({path: "".join(map(str, digits)).lstrip("0") or "0"}),
    )


def _read_mode(draw: Draw) -> DrawnTask:
    path, mode, out = f"{draw.word()}{draw.number(1, 99)}.{draw.one(_SUFFIXES)}", _mode(draw), draw.output()
    return DrawnTask(
        instruction=draw.either(
            f"Write the permissions of {path} as three octal digits to {out}.",
            f"What is the mode of {path}? Write it to {out} in octal, such as 644.",
        ),
        files=_files([path], draw),
        setup=f"chmod {mode} {path}\n",
        solution=f"stat -c %a {path} > {out}\n",
        checks=file_case(out, mode, "words"),
    )


def _whole_tree(draw: Draw) -> DrawnTask:
    root, paths = draw.word(), _paths(draw, 6, 14)
    of_files = f"{draw.one('46')}{draw.one('046')}{draw.one('04')}"
    of_folders = f"7{draw.one('0157')}{draw.one('015')}"
    paths = [f"{root}/{path}" for path in paths]
    folders = {root, *(path.rpartition("/")[0] for path in paths)}
    folders |= {folder.rpartition("/")[0] for folder in folders if "/" in folder}
    modes = dict.fromkeys(paths, of_files) | dict.fromkeys(sorted(folders), of_folders)
    return DrawnTask(
        instruction=f"Set the mode of all files below {root} to {of_files}, and the mode of {root} and all folders "
        f"below it to {of_folders}.",
        files=_files(paths, draw),
        setup=_chmod(dict.fromkeys(paths, "666")) + _chmod(dict.fromkeys(sorted(folders), "777")),
        solution=f"find {root} -type f -exec chmod {of_files} {{}} +\nfind {root} -type d -exec chmod {of_folders} "
        "{} +\n",
        checks=modes_case(modes),
    )


def _by_suffix(draw: Draw) -> DrawnTask:
    root, (suffix, other) = draw.word(), draw.some(_SUFFIXES, 2)
    before = {f"{root}/{path}": _mode(draw) for path in _paths(draw, 8, 16, (suffix, other))}
    who, change, mask = draw.either(
        ("executable for everyone", "a+x", 0o111),
        ("writable for their group", "g+w", 0o020),
        ("readable for everyone", "a+r", 0o444),
        ("executable for their owner and group", "ug+x", 0o110),
    )
    modes = {path: f"{int(mode, 8) | mask:o}" if path.endswith(suffix) else mode for path, mode in before.items()}
    if modes == before:
        return _by_suffix(draw)
    return DrawnTask(
        instruction=f"Make all .{suffix} files below {root} (in subfolders too) {who}. Leave their other permissions "
        "and all other files as they are.",
        files=_files(before, draw),
        setup=_chmod(before),
        solution=f"find {root} -type f -name '*.{suffix}' -exec chmod {change} {{}} +\n",
        checks=modes_case(modes),
    )


def _count_bit(draw: Draw) -> DrawnTask:
    root, out = draw.word(), draw.output()
    letter, (bit, (_, value)) = draw.one("go"), draw.one(list(_BITS.items()))
    share = draw.number(1, 9) / 10
    at = "ugo".index(letter)
    count, modes = 0, {}
    for path in _paths(draw, 40, 90):
        digits = [int(digit) for digit in _mode(draw)]
        has = draw.chance(share)
        digits[at] = digits[at] | value if has else digits[at] & ~value
        count += has
        modes[f"{root}/{path}"] = "".join(map(str, digits))
    return DrawnTask(
        instruction=f"Count the files below {root} (in subfolders too) for which "
        f"{'the group has' if letter == 'g' else 'other users have'} {bit} permission. Write the number to {out}.",
        files=_files(modes, draw),
        setup=_chmod(modes),
        solution=f"find {root} -type f -perm -{value * 8 ** (2 - at):03o} | wc -l > {out}\n",
        checks=file_case(out, str(count), "words"),
    )


def _from_list(draw: Draw) -> DrawnTask:
    root, listing = draw.word(), f"{draw.word()}.modes"
    paths = _paths(draw, 8, 14)
    before = {f"{root}/{path}": "644" for path in paths}
    wanted = {path: _mode(draw) for path in paths if draw.chance(0.7)}
    flipped = draw.chance(0.5)
    if not wanted or all(mode == "644" for mode in wanted.values()):
        return _from_list(draw)
    return DrawnTask(
        instruction=f"The lines of {listing} are {'PATH MODE' if flipped else 'MODE PATH'}, with the mode in octal and "
        f"the path relative to the folder {root}. Set the modes of these files. Other files stay as they are.",
        files={
            **_files(before, draw),
            listing: lines(f"{path} {mode}" if flipped else f"{mode} {path}" for path, mode in wanted.items()),
        },
        setup=_chmod(before),
        solution=f'cd {root}\nwhile read -r {"path mode" if flipped else "mode path"}; do chmod "$mode" "$path"; done '
        f"< ../{listing}\n",
        checks=modes_case({**before, **under(root, wanted)}),
    )


def _protect(draw: Draw) -> DrawnTask:
    root, mark = draw.word(), draw.either("SECRET", "PRIVATE KEY", "password=", "token:", "CONFIDENTIAL")
    files, before = {}, {}
    for path in _paths(draw, 10, 18):
        text = [draw.sentence() for _ in range(6)]
        if draw.chance(0.4):
            text[draw.number(0, 5)] = f"{draw.word()} {mark} {draw.word()}"
        files[f"{root}/{path}"] = lines(text)
        before[f"{root}/{path}"] = f"{draw.one('67')}{draw.number(0, 7)}{draw.number(1, 7)}"
    keep_group = draw.chance(0.5)
    modes = {
        path: mode[:2] + "0" if keep_group else mode[0] + "00" for path, mode in before.items() if mark in files[path]
    }
    if not modes:
        return _protect(draw)
    return DrawnTask(
        instruction=f"Take all permissions of {'other users' if keep_group else 'the group and of other users'} away "
        f"from each file below {root} whose "
        f'content contains "{mark}". Leave the other permissions and the other files as they are.',
        files=files,
        setup=_chmod(before),
        solution=f"grep -rlF '{mark}' {root} | while read -r path; do chmod {'o=' if keep_group else 'go='} "
        f'"$path"; done\n',
        checks=modes_case({**before, **modes}),
    )


def _list_bit(draw: Draw) -> DrawnTask:
    root, out = draw.word(), draw.output()
    what, option, mask = draw.either(
        ("other users can write", "-002", 0o002),
        ("the group can write", "-020", 0o020),
        ("the owner can execute", "-100", 0o100),
        ("other users can read", "-004", 0o004),
    )
    modes = {f"{root}/{path}": _mode(draw) for path in _paths(draw, 15, 30)}
    found = sorted(f"{path} {mode}" for path, mode in modes.items() if int(mode, 8) & mask)
    return DrawnTask(
        instruction=f"Write a line PATH MODE to {out} for each file below {root} (in subfolders too) that {what}. PATH "
        f"starts with {root}/, MODE is octal, such as 644. Sort the lines by bytes (LC_ALL=C sort).",
        files=_files(modes, draw),
        setup=_chmod(modes),
        solution=f"find {root} -type f -perm {option} -printf '%p %m\\n' | LC_ALL=C sort > {out}\n",
        checks=file_case(out, lines(found)),
    )


def _audit(draw: Draw) -> DrawnTask:
    script, policy = draw.script("sh"), f"{draw.word()}.policy"

    def example() -> tuple[dict[str, str], dict[str, str]]:
        wanted = {suffix: _mode(draw) for suffix in draw.some(_SUFFIXES, 4)}
        modes = {}
        for path in _paths(draw, 12, 20):
            suffix = path.rpartition(".")[2]
            modes[path] = wanted[suffix] if suffix in wanted and draw.chance(0.5) else _mode(draw)
        return wanted, modes

    def rules(wanted: dict[str, str]) -> str:
        return lines(f"{suffix} {mode}" for suffix, mode in wanted.items())

    (policy_now, now), (policy_then, then) = example(), example()
    found = []
    for path in sorted(then):
        want = policy_then.get(path.rpartition(".")[2])
        if want and want != then[path]:
            found.append(f"{path} {then[path]} {want}")
    program = """
cd "$1"
find . -type f -printf '%P %m\\n' | LC_ALL=C sort | awk -v policy="$OLDPWD/$2" '
BEGIN { while ((getline line < policy) > 0) { split(line, part, " "); want[part[1]] = part[2] } }
{ suffix = $1; sub(/.*[.]/, "", suffix); if (suffix in want && want[suffix] != $2) print $1, $2, want[suffix] }'
"""
    return DrawnTask(
        instruction=f"The lines of {policy} are SUFFIX MODE: files whose names end with .SUFFIX should have this mode. "
        f"Write a script {script}, run as `bash {script} FOLDER POLICY`, as in `bash {script} tree {policy}`, which "
        "prints a line PATH FOUND WANTED for each file below FOLDER (in subfolders too) with another mode than it "
        "should have: its path relative to FOLDER, its mode and the mode of the policy, in octal. Sort the lines by "
        "path, by bytes (LC_ALL=C). Files with other suffixes are not printed. The script is run on other folders and "
        "policies too.",
        files={**_files(under("tree", now), draw), policy: rules(policy_now)},
        setup=_chmod(under("tree", now)),
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script} other rules",
            files={**_files(under("other", then), draw), "rules": rules(policy_then)},
            modes=under("other", then),
            stdout=lines(found),
        ),
    )


def _copy_modes(draw: Draw) -> DrawnTask:
    script = draw.script("sh")
    first, second = draw.words(2)

    def example() -> tuple[dict[str, str], dict[str, str]]:
        paths = _paths(draw, 12, 18)
        return {path: _mode(draw) for path in paths if draw.chance(0.8)}, {
            path: "644" for path in paths if draw.chance(0.8)
        }

    visible, (source, target) = example(), example()
    result = {path: source.get(path, mode) for path, mode in target.items()}
    missing = sorted(path for path in target if path not in source)
    program = """
cd "$2"
find . -type f | sed 's,^[.]/,,' | LC_ALL=C sort | while read -r path; do
  if [ -f "$OLDPWD/$1/$path" ]; then
    chmod "$(stat -c %a "$OLDPWD/$1/$path")" "$path"
  else
    echo "$path"
  fi
done
"""
    return DrawnTask(
        instruction=f"Write a script {script}, run as `bash {script} FROM TO`, as in `bash {script} {first} {second}`, "
        "which gives each file below TO the mode of the file with the same relative path below FROM. Files of TO that "
        "are not in FROM keep their mode; the script prints their relative paths, one a line, sorted by bytes "
        "(LC_ALL=C). Contents and the folder FROM do not change. It is run on other folders too.",
        files=_files({**under(first, visible[0]), **under(second, visible[1])}, draw),
        setup=_chmod(under(first, visible[0])),
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script} from to",
            files=_files({**under("from", source), **under("to", target)}, draw),
            modes={**under("from", source), **under("to", target)},
            stdout=lines(missing),
            then=modes_case({**under("from", source), **under("to", result)}),
        ),
    )


def _rules(draw: Draw) -> DrawnTask:
    name = draw.script("py")
    last = draw.chance(0.5)

    def example() -> tuple[list[tuple[str, str]], list[str]]:
        paths = _paths(draw, 14, 22)
        rules = []
        for _ in range(draw.number(5, 8)):
            path = draw.one(paths)
            folder, _, name = path.rpartition("/")
            suffix = name.rpartition(".")[2]
            patterns = [f"*.{suffix}", f"{name[:2]}*", path, f"*{name[2:]}"] + ([f"{folder}/*"] if folder else [])
            rules.append((draw.one(patterns), _mode(draw)))
        return rules, paths

    (rules_now, paths_now), (rules_then, paths_then) = example(), example()
    modes = {}
    for path in paths_then:
        found = [mode for pattern, mode in rules_then if fnmatch.fnmatchcase(path, pattern)]
        modes[f"files/{path}"] = (found[-1] if last else found[0]) if found else "600"
    program = f"""
import os, sys
from fnmatch import fnmatchcase
rules = [line.split() for line in open(sys.argv[2])]
for parent, _, names in os.walk(sys.argv[1]):
    for name in names:
        path = os.path.join(parent, name)
        found = [mode for mode, pattern in rules if fnmatchcase(os.path.relpath(path, sys.argv[1]), pattern)]
        os.chmod(path, int(found[{-1 if last else 0}], 8) if found else 0o600)
"""
    return DrawnTask(
        instruction=f"Write a Python program {name}, run as `python3 {name} FOLDER RULES`, as in `python3 {name} site "
        "rules.txt`, which sets the modes of all files below FOLDER. A line of RULES is MODE PATTERN, such as 640 "
        "*.txt; it holds for a file if the pattern matches its whole path relative to FOLDER. In a pattern, * stands "
        f"for any characters, slashes too. If several rules hold, the {'last' if last else 'first'} one in RULES "
        "counts; if none holds, the mode is 600. The modes of folders do not change. The program is run on other "
        "folders and rules too.",
        files={
            **_files([f"site/{path}" for path in paths_now], draw),
            "rules.txt": lines(f"{mode} {pattern}" for pattern, mode in rules_now),
        },
        solution=write_file(name, program),
        checks=run_case(
            f"python3 {name} files policy",
            files={**_files(modes, draw), "policy": lines(f"{mode} {pattern}" for pattern, mode in rules_then)},
            then=modes_case(modes),
        ),
    )


def _access(draw: Draw) -> DrawnTask:
    script = draw.script("sh")
    bit, (_, value) = draw.one(list(_BITS.items()))

    def example() -> tuple[str, str, str, list[str]]:
        users, groups = draw.words(5), draw.words(4)
        members = {group: draw.some(users, draw.number(1, 3)) for group in groups}
        user, listing, found = draw.one(users), [], []
        for path in _paths(draw, 20, 30):
            mode = f"{draw.number(0, 7)}{draw.number(0, 7)}{draw.number(0, 7)}"
            owner, group = draw.one(users), draw.one(groups)
            if draw.chance(0.3):
                owner = user
            listing.append(f"{mode} {owner} {group} {path}")
            digit = mode[0] if owner == user else mode[1] if user in members[group] else mode[2]
            if int(digit) & value:
                found.append(path)
        return lines(listing), lines(f"{group}: {','.join(names)}" for group, names in members.items()), user, found

    visible, (listing, groups, user, found) = example(), example()
    program = f"""
awk -v user="$3" 'NR == FNR {{
  sub(/:$/, "", $1)
  n = split($2, names, ",")
  for (i = 1; i <= n; i++) if (names[i] == user) member[$1] = 1
  next
}}
{{
  digit = substr($1, $2 == user ? 1 : $3 in member ? 2 : 3, 1)
  if (int(digit / {value}) % 2) print $4
}}' "$2" "$1"
"""
    return DrawnTask(
        instruction=f"Write a script {script}, run as `bash {script} LISTING GROUPS USER`, as in `bash {script} "
        f"files.txt groups.txt {visible[2]}`, which prints the paths of all files that USER may {bit}, in the order of "
        "LISTING, one a line. A line of LISTING is MODE OWNER GROUP PATH with three octal digits; a line of GROUPS is "
        "GROUP: USER,USER,... Apply the rules of the Linux kernel for a user without privileges: the owner's digit "
        "counts for the owner, otherwise the group's digit for members of the group, otherwise the last digit. Only "
        "the permission bits of the file itself count, not those of folders. The script is run on other files and "
        "users too.",
        files={"files.txt": visible[0], "groups.txt": visible[1]},
        solution=write_file(script, program),
        checks=run_case(f"bash {script} l g {user}", files={"l": listing, "g": groups}, stdout=lines(found)),
    )


FAMILY = Family(
    name="permissions",
    summary="Read, set and audit the permission bits of files and folders.",
    kinds={
        1: (_set_mode, _change_bit, _read_mode),
        2: (_whole_tree, _by_suffix, _count_bit),
        3: (_from_list, _protect, _list_bit),
        4: (_audit, _copy_modes),
        5: (_rules, _access),
    },
)
