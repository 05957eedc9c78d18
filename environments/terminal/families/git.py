"""Git: commit, inspect, merge, rewrite and repair the history of a repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .family import Case, Draw, DrawnTask, Family, absent_case, file_case, git_case, lines, write_file

_VERBS = ("add", "fix", "update", "remove", "rename", "document", "test", "move", "check", "sort")
_PEOPLE = ("Ada", "Ben", "Carla", "Dmitri", "Elif", "Farid")


def _subjects(draw: Draw, count: int) -> list[str]:
    return [f"{draw.one(_VERBS)} {first} {draw.word()}" for first in draw.words(count)]


def _text(draw: Draw, low: int = 3, high: int = 8) -> str:
    return lines(draw.sentence(2, 5) for _ in range(draw.number(low, high)))


def _start(repository: str) -> str:
    configure = "git config user.name Agent\ngit config user.email agent@example.com\n"
    return f"git init -q -b main {repository}\ncd {repository}\n{configure}"


def _commit(subject: str, files: Mapping[str, str], author: str = "") -> str:
    """Return shell commands that write files and commit everything."""
    option = f" --author '{author} <{author.lower()}@example.com>'" if author else ""
    return (
        "".join(write_file(path, content) for path, content in files.items())
        + f"git add -A\ngit commit -qm '{subject}'{option}\n"
    )


def _log(repository: str, subjects: Sequence[str], branch: str = "main") -> list[Case]:
    """Return the case of the subjects of all commits of a branch, oldest first."""
    return git_case(repository, f"log --reverse --topo-order --format=%s {branch}", stdout=lines(subjects))


def _content(repository: str, files: Mapping[str, str], branch: str = "main") -> list[Case]:
    """Return the cases of the names and contents of all files of a branch."""
    cases = git_case(repository, f"ls-tree -r --name-only {branch}", stdout=lines(sorted(files)))
    for path, text in files.items():
        cases += git_case(repository, f"cat-file -p {branch}:{path}", stdout=text, form="exact")
    return cases


def _clean(repository: str) -> list[Case]:
    return git_case(repository, "status --porcelain", stdout="")


def _history(draw: Draw, count: int) -> tuple[list[str], list[dict[str, str]]]:
    """Return the subjects and the changed files of commits; each commit changes or adds one whole file."""
    names = [f"{word}.txt" for word in draw.words(max(2, count // 2))]
    return _subjects(draw, count), [{draw.one(names): _text(draw)} for _ in range(count)]


def _made(repository: str, subjects: Sequence[str], changes: Sequence[Mapping[str, str]]) -> str:
    return _start(repository) + "".join(
        _commit(subject, change) for subject, change in zip(subjects, changes, strict=True)
    )


def _merged(changes: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {path: text for change in changes for path, text in change.items()}


def _task(instruction: str, setup: str, solution: str, checks: Sequence[Case]) -> DrawnTask:
    return DrawnTask(instruction=instruction, setup=setup, solution=solution, checks=checks, programs=("git",))


def _commit_file(draw: Draw) -> DrawnTask:
    repository, (subjects, changes) = draw.word(), _history(draw, 2)
    name, text, subject = f"{draw.word()}.md", _text(draw, 1, 3), _subjects(draw, 1)[0]
    return _task(
        draw.either(
            f'In the git repository {repository}, commit the new file {name} with the message "{subject}".',
            f'Add {name} to the git repository {repository} and commit it. The commit message is "{subject}".',
        ),
        _made(repository, subjects, changes) + write_file(name, text),
        f"cd {repository}\ngit add {name}\ngit commit -qm '{subject}'\n",
        [*_log(repository, [*subjects, subject]), *_content(repository, {**_merged(changes), name: text})],
    )


def _name_commit(draw: Draw) -> DrawnTask:
    repository, (subjects, changes) = draw.word(), _history(draw, 2)
    is_tag = draw.chance(0.5)
    name = (
        f"v{draw.number(0, 9)}.{draw.number(0, 30)}.{draw.number(0, 30)}" if is_tag else f"{draw.word()}-{draw.word()}"
    )
    kind = "tag" if is_tag else "branch"
    return _task(
        draw.either(
            f"Create the {kind} {name} in the git repository {repository}, at the current commit.",
            f"The git repository {repository} needs a {kind} {name} at its current commit.",
        ),
        _made(repository, subjects, changes),
        f"git -C {repository} {kind} {name}\n",
        [*_log(repository, subjects), *_log(repository, subjects, f"refs/{'tags' if is_tag else 'heads'}/{name}")],
    )


def _last_subject(draw: Draw) -> DrawnTask:
    repository, out, (subjects, changes) = draw.word(), draw.output(), _history(draw, draw.number(3, 5))
    person, host = draw.one(_PEOPLE), draw.word()
    email = f"{person.lower()}{draw.number(1, 99)}@{host}.example.com"
    what, format, answer = draw.either(("message", "%s", subjects[-1]), ("author's e-mail address", "%ae", email))
    setup = _made(repository, subjects, changes) + f"git commit -q --amend --no-edit --author '{person} <{email}>'\n"
    return _task(
        draw.either(
            f"Write the {what} of the last commit of the git repository {repository} to {out}.",
            f"What is the {what} of the newest commit in {repository}? Write it to {out}.",
        ),
        setup,
        f"git -C {repository} log -1 --format={format} > {out}\n",
        file_case(out, answer),
    )


def _old_content(draw: Draw) -> DrawnTask:
    repository, out, name = draw.word(), draw.output(), f"{draw.word()}.txt"
    subjects = _subjects(draw, draw.number(5, 9))
    texts = [_text(draw, 1, 4) for _ in subjects]
    at = draw.number(0, len(texts) - 2)
    by_tag = draw.chance(0.5)
    tag = f"v{draw.number(1, 9)}.{draw.number(0, 99)}"
    commits = [
        _commit(subject, {name: text}) + (f"git tag {tag}\n" if by_tag and number == at else "")
        for number, (subject, text) in enumerate(zip(subjects, texts, strict=True))
    ]
    which = f"the tag {tag}" if by_tag else f'the commit with the message "{subjects[at]}"'
    return _task(
        f"Write the content that {name} had in {which} of the git repository {repository} to {out} (in the current "
        f"folder, beside {repository}). Change nothing in the repository.",
        _start(repository) + "".join(commits),
        f"cd {repository}\ngit show "
        f"{tag if by_tag else f'$(git log --format=%h --grep=^{subjects[at].replace(chr(32), chr(46))}$)'}:{name} > "
        f"../{out}\n",
        [*file_case(out, texts[at], "exact"), *_log(repository, subjects), *_clean(repository)],
    )


def _by_author(draw: Draw) -> DrawnTask:
    repository, out, people = draw.word(), draw.output(), draw.some(_PEOPLE, 3)
    subjects, changes = _history(draw, draw.number(8, 14))
    authors = [draw.one(people) for _ in subjects]
    person = authors[draw.number(0, 2)]
    found = [subject for subject, author in zip(subjects, authors, strict=True) if author == person]
    return _task(
        f"Write the messages of all commits by {person} in the git repository {repository} to {out} (beside "
        f"{repository}), one a line, the oldest first.",
        _start(repository)
        + "".join(
            _commit(subject, change, author) for subject, change, author in zip(subjects, changes, authors, strict=True)
        ),
        f"git -C {repository} log --reverse --author={person} --format=%s > {out}\n",
        file_case(out, lines(found)),
    )


def _restore(draw: Draw) -> DrawnTask:
    repository, subjects = draw.word(), _subjects(draw, 3)
    files = {f"{name}.txt": _text(draw) for name in draw.words(5)}
    lost, changed, kept, *_ = names = draw.some(list(files), 5)
    edited = files[kept] + draw.sentence() + "\n"
    setup = _start(repository) + "".join(
        _commit(subject, {path: files[path] for path in part})
        for subject, part in zip(subjects, (names[:2], names[2:3], names[3:]), strict=True)
    )
    return _task(
        f"In the work tree of the git repository {repository}, somebody deleted {lost} and changed {changed} and "
        f"{kept}, without a commit. Restore {lost} and {changed} to their content in the last commit. Keep the change "
        f"of {kept} uncommitted.",
        setup + f"rm {lost}\n{write_file(changed, _text(draw))}{write_file(kept, edited)}",
        f"cd {repository}\ngit checkout -q -- {lost} {changed}\n",
        [
            *(
                case
                for path, text in {**files, kept: edited}.items()
                for case in file_case(f"{repository}/{path}", text, "exact")
            ),
            *_log(repository, subjects),
        ],
    )


def _lost(draw: Draw) -> DrawnTask:
    repository, (subjects, changes) = draw.word(), _history(draw, draw.number(3, 5))
    lost, after = _subjects(draw, 2)
    name, new = f"{draw.word()}-{draw.word()}.md", f"{draw.word()}-{draw.word()}.txt"
    text, other = _text(draw), _text(draw)
    setup = (
        _made(repository, subjects, changes)
        + _commit(lost, {name: text})
        + "git reset -q --hard HEAD~1\n"
        + _commit(after, {new: other})
    )
    return _task(
        f'In the git repository {repository}, the commit "{lost}" was lost by `git reset --hard`; the commit '
        f'"{after}" was made since then. Bring the lost commit back, with its message, as the last commit of the '
        f'branch main, after "{after}". Leave the work tree clean.',
        setup,
        f"cd {repository}\ngit cherry-pick $(git reflog --format='%h %gs' | grep -F '{lost}' | head -n 1 | cut -d' ' "
        "-f1) >/dev/null\n",
        [
            *_log(repository, [*subjects, after, lost]),
            *_content(repository, {**_merged(changes), name: text, new: other}),
            *_clean(repository),
        ],
    )


def _branched(branch: str, subjects: Sequence[str], changes: Sequence[Mapping[str, str]]) -> str:
    """Return the commands that make a branch with commits, and go back to main."""
    return f"git checkout -q -b {branch}\n{''.join(map(_commit, subjects, changes))}git checkout -q main\n"


def _pick(draw: Draw) -> DrawnTask:
    repository, branch, (subjects, changes) = draw.word(), f"{draw.word()}-{draw.word()}", _history(draw, 3)
    news = _subjects(draw, draw.number(3, 5))
    files = [{f"{draw.word()}-{number}.txt": _text(draw)} for number in range(len(news))]
    chosen = draw.number(0, len(news) - 2)
    setup = _made(repository, subjects, changes) + _branched(branch, news, files)
    return _task(
        f'In the git repository {repository}, apply the commit "{news[chosen]}" of the branch {branch} to the branch '
        f"main, with the same message, but no other commit of {branch}. The branch {branch} stays as it is.",
        setup,
        f"cd {repository}\ngit cherry-pick $(git log --format=%h --grep='^{news[chosen]}$' {branch}) >/dev/null\n",
        [
            *_log(repository, [*subjects, news[chosen]]),
            *_content(repository, _merged([*changes, files[chosen]])),
            *_log(repository, [*subjects, *news], branch),
        ],
    )


def _revert(draw: Draw) -> DrawnTask:
    repository, name, count = draw.word(), f"{draw.word()}.conf", draw.number(6, 10)
    subjects, keys = _subjects(draw, count), draw.words(count)
    levels = [(draw.number(1, 499), draw.number(500, 999)) for _ in keys]
    bad = draw.number(1, count - 2)

    def text(upto: int, skipped: int = -1) -> str:
        now = [levels[number][0 < number <= upto and number != skipped] for number in range(count)]
        return "".join(
            f"[{key}]\nhost = {key}.example.com\nlevel = {level}\nretry = 3\nmode = auto\n"
            for key, level in zip(keys, now, strict=True)
        )

    setup = _start(repository) + "".join(
        _commit(subject, {name: text(number)}) for number, subject in enumerate(subjects)
    )
    return _task(
        f'In the git repository {repository}, undo the commit "{subjects[bad]}" on the branch main with a new commit, '
        f'whose message starts with "Revert". The changes of all other commits stay, the history too.',
        setup,
        f"cd {repository}\ngit revert --no-edit $(git log --format=%h --grep='^{subjects[bad]}$') >/dev/null\n",
        [
            *git_case(repository, "log -1 '--format=%<(6,trunc)%s' main", stdout="Reve.."),
            *git_case(repository, "log --reverse --format=%s main~1", stdout=lines(subjects)),
            *_content(repository, {name: text(count, bad)}),
            *_clean(repository),
        ],
    )


def _origin(draw: Draw) -> DrawnTask:
    repository, out, name, count = draw.word(), draw.output(), f"{draw.word()}.py", draw.number(20, 24)
    subjects, key = _subjects(draw, count), draw.word().upper()
    at = draw.number(1, count - 2)
    values = [draw.number(1, 50)] * at
    values += [values[0] + 77] * (count - at)
    is_first = draw.chance(0.5)
    commits = [
        _commit(subject, {name: f"{key} = {value}\nSTEP = {number}\n"})
        for number, (subject, value) in enumerate(zip(subjects, values, strict=True))
    ]
    return _task(
        f"In the git repository {repository}, {name} sets {key} to {values[-1]}. "
        + (
            f"Which commit of the branch main changed it to this value? Write the message of this commit to {out}"
            if is_first
            else f"Which was the last commit of the branch main in which it still had the value {values[0]}? Write the "
            f"message of this commit to {out}"
        )
        + f" (beside {repository}).",
        _start(repository) + "".join(commits),
        f"cd {repository}\ngit log -S'{key} = {values[-1]}' --format=%H -- {name} | tail -n 1 | sed "
        f"'s/$/{'' if is_first else '~1'}/' | xargs git log -1 --format=%s > ../{out}\n",
        file_case(out, subjects[at if is_first else at - 1]),
    )


def _conflict(draw: Draw) -> DrawnTask:
    repository, branch, name, keys = draw.word(), f"{draw.word()}-{draw.word()}", f"{draw.word()}.conf", draw.words(8)
    base = {key: draw.number(1, 999) for key in keys}
    ours, theirs, extra = dict(base), dict(base), {f"{draw.word()}.md": _text(draw)}
    for key in draw.some(keys, 4):
        ours[key] += draw.number(1, 400)
        theirs[key] += draw.number(401, 900)
    prefers = draw.either("larger", "smaller", branch, "main")
    merged = {
        key: {"larger": max, "smaller": min}[prefers](ours[key], theirs[key])
        if prefers in ("larger", "smaller")
        else theirs[key]
        if prefers == branch
        else ours[key]
        for key in keys
    }
    (subject, one, two), final = _subjects(draw, 3), draw.sentence(2, 4)

    def text(values: Mapping[str, int]) -> str:
        return lines(f"{key} = {value}" for key, value in values.items())

    setup = _start(repository) + _commit(subject, {name: text(base)})
    setup += _branched(branch, [one], [{name: text(theirs), **extra}]) + _commit(two, {name: text(ours)})
    rule = (
        f"the {prefers} one of the two values"
        if prefers in ("larger", "smaller")
        else f"the value of the branch {prefers}"
    )
    return _task(
        f"In the git repository {repository}, merge the branch {branch} into main, with a merge commit that has the "
        f'message "{final}". Where both branches changed a setting of {name} to different values, take {rule}. Keep '
        f"the order of the settings. Leave the work tree clean.",
        setup,
        f"cd {repository}\ngit merge -q {branch} >/dev/null || true\n{write_file(name, text(merged))}git add -A\ngit "
        f"commit -qm '{final}'\n",
        [
            *git_case(repository, "log -1 --format=%s main", stdout=final),
            *git_case(repository, "log --format=%s main^1", stdout=lines([two, subject])),
            *git_case(repository, "log --format=%s main^2", stdout=lines([one, subject])),
            *_content(repository, {name: text(merged), **extra}),
            *_clean(repository),
        ],
    )


def _purge(draw: Draw) -> DrawnTask:
    repository, (subjects, changes) = draw.word(), _history(draw, draw.number(5, 7))
    secret, at = f"{draw.word()}.{draw.either('key', 'pem', 'env')}", draw.number(1, 3)
    changes[at] = {**changes[at], secret: f"{draw.word()}{draw.number(1000, 9999)}\n"}
    is_deleted = draw.chance(0.5)
    deletes = "delete the secret"
    subjects_now = [*subjects, *([deletes] if is_deleted else [])]
    setup = _made(repository, subjects, changes) + (
        f"git rm -q {secret}\ngit commit -qm '{deletes}'\n" if is_deleted else ""
    )
    files = {path: text for path, text in _merged(changes).items() if path != secret}
    return _task(
        f"In the git repository {repository}, {secret} was committed by "
        f"mistake{', and deleted by a later commit' if is_deleted else ''}. Rewrite the branch main so that no commit "
        "of it has this file. All "
        + (f'commits (also "{deletes}", which may then be empty or left out)' if is_deleted else "commits")
        + ", their messages and the other files stay. Leave no other branches or tags.",
        setup,
        f"cd {repository}\nexport FILTER_BRANCH_SQUELCH_WARNING=1\ngit filter-branch -f --index-filter 'git rm -q "
        f"--cached --ignore-unmatch {secret}' --prune-empty main >/dev/null 2>&1\ngit for-each-ref --format='delete "
        "%(refname)' refs/original | git update-ref --stdin\ngit reset -q --hard\n",
        [
            *git_case(repository, f"log --full-history --format=%s --all -- {secret}", stdout=""),
            *git_case(
                repository,
                f"log --reverse --format=%s --invert-grep '--grep=^{deletes}$' main",
                stdout=lines(subject for subject in subjects_now if subject != deletes),
            ),
            *git_case(repository, "for-each-ref '--format=%(refname)'", stdout="refs/heads/main"),
            *_content(repository, files),
        ],
    )


def _squash(draw: Draw) -> DrawnTask:
    repository, (subjects, changes), final = draw.word(), _history(draw, draw.number(6, 9)), _subjects(draw, 1)[0]
    count, at_end = draw.number(2, 4), draw.chance(0.5)
    first = len(subjects) - count if at_end else draw.number(1, len(subjects) - count - 1)
    result = [*subjects[:first], final, *subjects[first + count :]]
    which = (
        f"the last {count} commits of the branch main"
        if at_end
        else f'the {count} successive commits from "{subjects[first]}" to "{subjects[first + count - 1]}" of the '
        f"branch main"
    )
    return _task(
        f'In the git repository {repository}, combine {which} into one commit with the message "{final}" and the same '
        f"changes. All other commits stay in their order, with their messages. Leave the work tree clean.",
        _made(repository, subjects, changes),
        f"""cd {repository}
new=$(git commit-tree -p main~{len(subjects) - first} -m '{final}' main~{len(subjects) - first - count}^{{tree}})
git rebase -q --onto $new main~{len(subjects) - first - count} main
""",
        [
            *_log(repository, result),
            *_content(repository, _merged(changes)),
            *git_case(
                repository,
                f"diff-tree -r --name-only --no-commit-id main~{len(result) - first - 1}",
                stdout=lines(sorted(_merged(changes[first : first + count]))),
            ),
            *_clean(repository),
        ],
    )


def _culprit(draw: Draw) -> DrawnTask:
    repository, out, count, keys = draw.word(), draw.output(), draw.number(21, 26), draw.words(26)
    subjects, bad = _subjects(draw, count), draw.number(3, count - 4)
    numbers = [draw.number(1, 40) for _ in keys]

    def files(upto: int, skipped: int = -1) -> dict[str, str]:
        present = [number for number in range(upto + 1) if number != skipped]
        return {f"{keys[number]}.txt": f"{numbers[number] + (500 if number == bad else 0)}\n" for number in present}

    test = 'cat *.txt | awk \'{ n += $1 > 400 } END { print n ? "failed" : "passed"; exit n > 0 }\'\n'
    setup = _start(repository) + "".join(
        _commit(
            subject,
            {
                f"{keys[number]}.txt": files(number)[f"{keys[number]}.txt"],
                **({"check.sh": test} if number == 0 else {}),
            },
        )
        for number, subject in enumerate(subjects)
    )
    return _task(
        f"In the git repository {repository}, `sh check.sh` fails on the branch main, but passed in its first commit. "
        f"Find the commit since which it fails. Write the message of this commit to {out} (in the current folder, "
        f"beside {repository}), and undo the commit on main with a new commit, so that the check passes. The history "
        "and the changes of all other commits stay; leave the work tree clean.",
        setup,
        f"cd {repository}\ngit bisect start main $(git rev-list --max-parents=0 main) >/dev/null\ngit bisect run sh "
        "check.sh >/dev/null\nbad=$(git rev-parse refs/bisect/bad)\ngit bisect reset >/dev/null 2>&1\ngit log -1 "
        f"--format=%s $bad > ../{out}\ngit revert --no-edit $bad >/dev/null\n",
        [
            *file_case(out, subjects[bad]),
            *git_case(repository, "log --reverse --format=%s main~1", stdout=lines(subjects)),
            *_content(repository, {**files(count - 1, bad), "check.sh": test}),
            *_clean(repository),
        ],
    )


def _rebase(draw: Draw) -> DrawnTask:
    repository, branch, (subjects, changes) = draw.word(), f"{draw.word()}-{draw.word()}", _history(draw, 3)
    news, later = _subjects(draw, draw.number(4, 6)), _subjects(draw, 2)
    files = [{f"{draw.word()}-{number}.txt": _text(draw)} for number in range(len(news))]
    later_files = [{f"{draw.word()}-main{number}.txt": _text(draw)} for number in range(2)]
    dropped = draw.number(0, len(news) - 2)
    setup = _made(repository, subjects, changes) + _branched(branch, news, files)
    setup += "".join(map(_commit, later, later_files)) + f"git branch -q -D {branch}\n"
    rest = [number for number in range(len(news)) if number != dropped]
    return _task(
        f'In the git repository {repository}, the branch {branch} was deleted; its last commit was "{news[-1]}", and '
        f"it was never merged. Create it again, based on the current main: first all commits of main, then the "
        f'{len(rest)} other commits of the branch in their order, without the commit "{news[dropped]}" and its '
        f"changes. "
        f"The history is linear (no merge commits); main stays as it is.",
        setup,
        f"""cd {repository}
tip=$(git reflog --format='%H %gs' | grep -F 'commit: {news[-1]}' | head -n 1 | cut -d' ' -f1)
git checkout -q -b {branch} $tip
git rebase -q --onto $tip~{len(news) - dropped} $tip~{len(news) - dropped - 1} {branch}
git rebase -q main {branch}
git checkout -q main
""",
        [
            *_log(repository, [*subjects, *later, *(news[number] for number in rest)], branch),
            *git_case(repository, f"rev-list --count --merges {branch}", stdout="0"),
            *_content(repository, _merged([*changes, *later_files, *(files[number] for number in rest)]), branch),
            *_log(repository, [*subjects, *later]),
            *absent_case(f"{repository}/.git/rebase-merge"),
        ],
    )


FAMILY = Family(
    name="git",
    summary="Commit, inspect, merge, rewrite and repair the history of a git repository.",
    kinds={
        1: (_commit_file, _name_commit, _last_subject),
        2: (_old_content, _by_author, _restore),
        3: (_lost, _pick, _revert, _origin),
        4: (_conflict, _purge, _squash),
        5: (_culprit, _rebase),
    },
)
