"""Processes: run programs, inspect and signal running ones, and write scripts that supervise them."""

from __future__ import annotations

import hashlib
import json

from .family import Case, Draw, DrawnTask, Family, file_case, lines, python, run_case, write_file

_QUIET = "</dev/null >/dev/null 2>&1 &"
_READ_ARGUMENTS = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"
_READ_ENVIRONMENTS = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _named(name: str, folder: str = ".") -> str:
    """Return a shell command that starts a process in a folder, with a name that is shown in place of its program."""
    return f"bash -c 'cd {folder} && exec -a \"{name}\" sleep 86400' {_QUIET}\n{_until('^' + name, 'cmdline')}"


def _until(pattern: str, file: str) -> str:
    """Return a shell command that waits until a file of the last background process matches a pattern."""
    return f"until grep -q '{pattern}' /proc/$!/{file} 2>/dev/null; do sleep 0.05; done\n"


def _output(draw: Draw) -> DrawnTask:
    job, out, word = f"{draw.word()}.sh", draw.output(), draw.word()
    count, factor, offset = draw.number(3, 30), draw.number(2, 99), draw.number(1, 999)
    return DrawnTask(
        instruction=draw.either(
            f"Run `sh {job}` and write its output to {out}.",
            f"Run the script {job} with sh. Store what it prints in the file {out}.",
        ),
        files={
            job: f"i=1\nwhile [ $i -le {count} ]; do\n  echo {word} $((i * {factor} + {offset}))\n  i=$((i + "
            "1))\ndone\n"
        },
        solution=f"sh {job} > {out}\n",
        checks=file_case(out, lines(f"{word} {i * factor + offset}" for i in range(1, count + 1))),
    )


def _status(draw: Draw) -> DrawnTask:
    job, out = f"{draw.word()}.sh", draw.output()
    first, second = draw.number(100, 9999), draw.number(100, 9999)
    return DrawnTask(
        instruction=draw.either(
            f"Run `sh {job}` and write its exit status to {out}.",
            f"With which exit status does `sh {job}` end? Write the number to {out}.",
        ),
        files={job: f"# {draw.sentence()}\nvalue=$(({first} * {second}))\nexit $((value % 251 + 1))\n"},
        solution=f"code=0\nsh {job} || code=$?\necho $code > {out}\n",
        checks=file_case(out, str(first * second % 251 + 1), "words"),
    )


def _variable(draw: Draw) -> DrawnTask:
    job, out, name = f"{draw.word()}.sh", draw.output(), draw.word().upper()
    value, salt = f"{draw.word()}-{draw.number(1, 999)}", draw.word()
    by_argument = draw.chance(0.5)
    use = "$1" if by_argument else f"${name}"
    return DrawnTask(
        instruction=f"Run `sh {job}` with "
        f"{'the argument' if by_argument else f'the environment variable {name} set to'} {value} and write its output "
        f"to {out}.",
        files={job: f'printf %s "{use}-{salt}" | sha256sum | cut -c1-12\n'},
        solution=f"{'' if by_argument else f'{name}={value} '}sh {job}{f' {value}' if by_argument else ''} > {out}\n",
        checks=file_case(out, _digest(f"{value}-{salt}"), "words"),
    )


def _argument(draw: Draw) -> DrawnTask:
    name, option, out = f"{draw.word()}-{draw.word()}", draw.either("port", "limit", "size", "batch"), draw.output()
    value = draw.number(1024, 65000)
    others = [f"{other} --{option}={draw.number(1024, 65000)}" for other in draw.words(3)]
    return DrawnTask(
        instruction=f"A process {name} is running, with --{option}=NUMBER in its command line (see `ps` or "
        f"/proc/PID/cmdline). Write this number to {out}.",
        services="".join(map(_named, draw.some([f"{name} --{option}={value}", *others], 4))),
        solution=f"{_READ_ARGUMENTS} | sed -n 's/^{name} --{option}=//p' > {out}\n",
        checks=file_case(out, str(value), "words"),
    )


def _environment(draw: Draw) -> DrawnTask:
    out, (first, second) = draw.output(), draw.words(2)
    name, value = f"{first}_{second}".upper(), f"{draw.word()}{draw.number(100, 99999)}"
    return DrawnTask(
        instruction=f"A `sleep` process is running whose environment has the variable {name} (see /proc/PID/environ). "
        f"Write the value of the variable to {out}.",
        services=f"{name}={value} sleep 86400 {_QUIET}\n{_until(f'{name}=', 'environ')}"
        f"{second.upper()}=none sleep 86400 {_QUIET}\n",
        solution=f"{_READ_ENVIRONMENTS} | sed -n 's/^{name}=//p' | head -n 1 > {out}\n",
        checks=file_case(out, value, "words"),
    )


def _failed(draw: Draw) -> DrawnTask:
    folder, out = draw.word(), draw.output()
    codes = {f"{name}.sh": draw.number(1, 9) if draw.chance(0.5) else 0 for name in draw.words(draw.number(8, 16))}
    wants_failed = draw.chance(0.5)
    found = sorted(name for name, code in codes.items() if bool(code) == wants_failed)
    return DrawnTask(
        instruction=f"Run each script in the folder {folder} with `sh`. Write the names of the scripts that "
        f"{'fail (exit status not 0)' if wants_failed else 'succeed (exit status 0)'} to {out}, one a line, sorted.",
        files={
            f"{folder}/{name}": f"# {draw.sentence()}\nn=$(({code} + {(k := draw.number(10, 99))}))\nexit $((n - "
            f"{k}))\n"
            for name, code in codes.items()
        },
        solution=f"cd {folder}\nfor job in *.sh; do\n  if {'! ' if wants_failed else ''}sh $job; then echo $job; "
        f"fi\ndone | LC_ALL=C sort > ../{out}\n",
        checks=file_case(out, lines(found)),
    )


def _signal(draw: Draw) -> DrawnTask:
    name, out, signal = draw.word(), draw.output(), draw.either("USR1", "USR2", "HUP")
    token, key = _digest(str(draw.number(0, 10**9))), draw.number(1, 9)
    hexadecimal = "0123456789abcdef"
    shifted = token.translate(str.maketrans(hexadecimal, hexadecimal[key:] + hexadecimal[:key]))
    program = f"""trap "echo {shifted} | tr {hexadecimal[key:] + hexadecimal[:key]} {hexadecimal} > {out}" {signal}
echo $$ > {name}.pid
while :; do sleep 1000 & wait; done"""
    return DrawnTask(
        instruction=f"The process whose id is in {name}.pid writes a report to {out} when it receives the signal "
        f"SIG{signal}. Make it do so.",
        services=f"sh -c '{program}' {_QUIET}\nuntil [ -s {name}.pid ]; do sleep 0.05; done\n",
        solution=f"kill -{signal} $(cat {name}.pid)\nuntil [ -s {out} ]; do sleep 0.1; done\n",
        checks=file_case(out, token, "words"),
    )


def _workers(draw: Draw) -> DrawnTask:
    kind, out, queues = draw.word(), draw.output(), draw.words(2)
    workers = [(name, draw.number(1024, 65000), draw.one(queues)) for name in draw.words(draw.number(5, 8))]
    found = sorted(f"{name} {port}" for name, port, queue in workers if queue == queues[0])
    if not found:
        return _workers(draw)
    commands = [f"{kind}-worker --name={name} --port={port} --queue={queue}" for name, port, queue in workers]
    pattern = f"s/^{kind}-worker --name=\\([a-z]*\\) --port=\\([0-9]*\\) --queue={queues[0]}$/\\1 \\2/p"
    return DrawnTask(
        instruction=f"Several processes {kind}-worker are running, with command lines such as `{commands[0]}`. Write a "
        f"line NAME PORT to {out} for each one with the queue {queues[0]}, sorted by name.",
        services="".join(map(_named, commands)),
        solution=f"{_READ_ARGUMENTS} | sed -n '{pattern}' | LC_ALL=C sort > {out}\n",
        checks=file_case(out, lines(found)),
    )


def _folders(draw: Draw) -> DrawnTask:
    out, root = draw.output(), draw.word()
    places = {f"{draw.word()}{draw.number(1, 99)}": place for place in draw.words(draw.number(4, 7))}
    found = sorted(f"{name} {place}" for name, place in places.items())
    starts = [_named(f"{root}-{name}", f"{root}/{place}") for name, place in places.items()]
    return DrawnTask(
        instruction=f"Several processes {root}-NAME are running (NAME differs), each in another subfolder of the "
        f"folder {root}. Write a line NAME FOLDER to {out} for each of them, sorted by NAME, where FOLDER is the name "
        f"of the subfolder that is its current working directory. For example: {draw.word()}7 {draw.word()}",
        setup=f"mkdir {root}\ncd {root}\nmkdir {' '.join(sorted({*places.values(), *draw.words(3)}))}\n",
        services="".join(starts),
        solution=f"""for process in /proc/[0-9]*; do
  name=$(cat $process/cmdline 2>/dev/null | tr '\\0' '\\n' | sed -n '1s/^{root}-//p')
  if [ -n "$name" ]; then echo "$name $(basename "$(readlink $process/cwd)")"; fi
done | LC_ALL=C sort > {out}
""",
        checks=file_case(out, lines(found)),
    )


def _limits(draw: Draw) -> DrawnTask:
    folder, out, word = draw.word(), draw.output(), draw.either("timeout", "hangs", "slow", "-")
    hanging = draw.number(1, 2)
    names = draw.words(draw.number(6, 10))
    codes = {name: draw.number(0, 99) for name in names}
    found = sorted(f"{name} {word if name in names[:hanging] else code}" for name, code in codes.items())
    return DrawnTask(
        instruction=f"Run each script in the folder {folder} with `bash` and kill it if it has not ended after 2 "
        f"seconds. Write a line NAME STATUS for each one to {out}, sorted by name: NAME is its file name without .sh, "
        f"STATUS is its exit status, or the text {word} if it had to be killed.",
        files={
            f"{folder}/{name}.sh": f"# {draw.sentence()}\n{'sleep 1000' if name in names[:hanging] else ':'}\nexit "
            f"{code}\n"
            for name, code in codes.items()
        },
        solution=f"""cd {folder}
for job in *.sh; do
  code=0
  timeout 2 bash $job || code=$?
  if [ $code = 124 ]; then code={word}; fi
  echo "${{job%.sh}} $code"
done | LC_ALL=C sort > ../{out}
""",
        checks=file_case(out, lines(found)),
    )


def _parallel(draw: Draw) -> DrawnTask:
    folder, script, report = draw.word(), f"{draw.word()}.sh", draw.output()

    def jobs(count: int) -> tuple[dict[str, str], list[str]]:
        codes = {name: draw.number(0, 99) for name in draw.words(count)}
        wait = f"""touch at-{{name}}
for i in $(seq 80); do
  if [ "$(ls at-* | wc -l)" -ge {count} ]; then exit {{code}}; fi
  sleep 0.1
done
exit 111
"""
        files = {f"{folder}/{name}.sh": wait.format(name=name, code=code) for name, code in codes.items()}
        return files, sorted(f"{name} {code}" for name, code in codes.items())

    visible, (hidden, found) = jobs(draw.number(3, 4)), jobs(draw.number(4, 6))
    program = f"""
for job in {folder}/*.sh; do
  name=$(basename $job .sh)
  {{ code=0; bash $job || code=$?; echo "$name $code" > status-$name; }} &
done
wait
cat status-* | LC_ALL=C sort > {report}
"""
    return DrawnTask(
        instruction=f"Write a script {script} that runs all scripts {folder}/*.sh with bash at the same time, from the "
        "current folder (they wait for each other, so one after the other does not work), and waits until all have "
        f"ended. It then writes a line NAME STATUS for each to {report}, sorted by name: NAME is its file name without "
        f".sh and STATUS its exit status. It is run as `bash {script}`, also in copies of this folder with other "
        f"scripts in {folder}.",
        files=visible[0],
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script}", remove=[folder, report], files=hidden, timeout_s=30, then=file_case(report, lines(found))
        ),
    )


def _retry(draw: Draw) -> DrawnTask:
    script, word = draw.script("sh"), draw.word()
    flaky = """echo "$*" >> calls
if [ "$(wc -l < calls)" -ge "$1" ]; then exit 0; fi
exit "$2"
"""
    hidden = _digest(str(draw.number(0, 10**9))) + ".sh"

    def case(most: int, success: int) -> list[Case]:
        code, text = draw.number(2, 99), f"{draw.word()} {draw.word()}"
        calls = min(most, success)
        attempts = [f"{word} {i}: {0 if i == success else code}" for i in range(1, calls + 1)]
        return run_case(
            f"bash {script} {most} bash {hidden} {success} {code} '{text}'",
            files={hidden: flaky},
            remove=["calls"],
            stdout=lines(attempts),
            exit=0 if success <= most else code,
            then=file_case("calls", f"{success} {code} {text}\n" * calls),
        )

    program = f"""
most=$1
shift
for i in $(seq "$most"); do
  code=0
  "$@" || code=$?
  echo "{word} $i: $code"
  if [ $code = 0 ]; then exit 0; fi
done
exit $code
"""
    cases = [*case(draw.number(4, 6), draw.number(2, 4)), *case(draw.number(2, 4), draw.number(5, 9)), *case(3, 1)]
    return DrawnTask(
        instruction=f"Write a script {script}, run as `bash {script} MOST COMMAND ARGUMENT...`, which runs COMMAND "
        "with its arguments until it succeeds (exit status 0), at most MOST times. After each attempt it prints the "
        f"line `{word} NUMBER: STATUS` with the number of the attempt, from 1, and its exit status. The script ends "
        "with the status of the last attempt. Arguments may contain spaces. An example of a command is `bash flaky.sh "
        "3 7`.",
        files={"flaky.sh": flaky},
        solution=write_file(script, program),
        checks=cases,
    )


def _stop(draw: Draw) -> DrawnTask:
    script, folder = draw.script("sh"), draw.word()
    stopped, killed, stale = draw.either(
        ("stopped", "killed", "stale"), ("terminated", "killed", "gone"), ("ok", "forced", "dead")
    )
    names = draw.words(6)
    drawn = draw.some(("plain", "plain", "slow", "stubborn", "gone", draw.either("plain", "gone")), 6)
    kinds = dict(zip(names, drawn, strict=True))
    words = {"plain": stopped, "slow": stopped, "stubborn": killed, "gone": stale}
    ends = {"plain": -15, "slow": 0, "stubborn": -9}
    driver = f"""
import json, os, pathlib, subprocess, sys, threading, time
SLOW = "import signal, sys, time\\ndef end(*_):\\n time.sleep(0.7)\\n sys.exit(0)\\nsignal.signal(15, end)\\n"
SLOW += "print(flush=True)\\ntime.sleep(60)"
STUBBORN = "import signal, time\\nsignal.signal(15, signal.SIG_IGN)\\nprint(flush=True)\\ntime.sleep(60)"
kinds = json.loads('{{}}' if len(sys.argv) < 2 else sys.argv[1])
folder = pathlib.Path({folder!r})
folder.mkdir(exist_ok=True)
started = {{}}
for name, kind in kinds.items():
    program = {{"slow": SLOW, "stubborn": STUBBORN}}.get(kind, "print(flush=True)\\nimport time\\ntime.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process.stdout.readline()
    (folder / (name + ".pid")).write_text(str(process.pid) + "\\n")
    if kind == "gone":
        process.kill()
        process.wait()
    else:
        threading.Thread(target=process.wait, daemon=True).start()
        started[name] = process
print(subprocess.run(["bash", {script!r}, str(folder)], stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)
for name, process in started.items():
    for _ in range(20):
        if process.returncode is None:
            time.sleep(0.1)
    print(name, process.returncode)
print(sorted(os.listdir(folder)), flush=True)
os._exit(0)
"""
    program = f"""
cd "$1"
for file in *.pid; do
  pid=$(cat $file)
  word={stopped}
  if kill -TERM $pid 2>/dev/null; then
    for i in $(seq 20); do
      if ! kill -0 $pid 2>/dev/null; then break; fi
      sleep 0.1
    done
    if kill -KILL $pid 2>/dev/null; then word={killed}; sleep 0.2; fi
  else
    word={stale}
  fi
  echo "${{file%.pid}} $word"
  rm $file
done
"""
    expected = [f"{name} {words[kinds[name]]}" for name in sorted(names)]
    expected += [f"{name} {ends[kinds[name]]}" for name in names if kinds[name] != "gone"] + ["[]"]
    hidden = _digest(str(draw.number(0, 10**9))) + ".py"
    return DrawnTask(
        instruction=f"Write a script {script}, run as `bash {script} FOLDER`, which stops processes. The files "
        "NAME.pid in FOLDER have the ids of processes that may be running. Send SIGTERM to each; if it has not ended "
        "2 seconds later, send SIGKILL. Delete the file NAME.pid. Print a line for each file, in the order of the "
        f"names: `NAME {stopped}` if the process ended after SIGTERM, `NAME {killed}` if it needed SIGKILL, `NAME "
        f"{stale}` if there was no such process. After the script, all of the processes must have ended. It is run "
        f"with other processes in the folder {folder}.",
        solution=write_file(script, program),
        checks=run_case(
            f"python3 {hidden} '{json.dumps(kinds)}'", files={hidden: driver}, stdout=lines(expected), timeout_s=30
        ),
    )


def _pool(draw: Draw) -> DrawnTask:
    script, hidden = draw.script("sh"), _digest(str(draw.number(0, 10**9)))
    most, mark = draw.number(2, 4), draw.either(":", " ", ";")

    def commands(count: int) -> tuple[list[str], list[str]]:
        codes = [(name, draw.number(0, 99)) for name in draw.words(count)]
        texts = [
            f"echo + >> log; sleep 0.{draw.number(6, 9)}; echo - >> log; : {name}; exit {code}" for name, code in codes
        ]
        return texts, [f"{number}{mark}{code}" for number, (_, code) in enumerate(codes, 1)]

    visible, (texts, found) = commands(5), commands(most * 2 + draw.number(1, 2))
    driver = f"""
bash {script} {most} {hidden}.txt
awk '/[+]/ {{ if (++now > most) most = now }} /-/ {{ now-- }} END {{ print "most", most, "left", now }}' log
"""
    program = f"""
import subprocess, sys
from concurrent.futures import ThreadPoolExecutor
commands = open(sys.argv[2]).read().splitlines()
with ThreadPoolExecutor(int(sys.argv[1])) as pool:
    results = pool.map(lambda command: subprocess.run(["sh", "-c", command]).returncode, commands)
for number, code in enumerate(results, 1):
    print(number, code, sep="{mark}")
"""
    return DrawnTask(
        instruction=f"Write a script {script}, run as `bash {script} MOST FILE`, as in `bash {script} 2 commands.txt`, "
        "which runs each line of FILE as a command of `sh`, at most MOST of them at the same time. Start them in the "
        "order of the lines, the next one as soon as a running one has ended, so that MOST are running as long as "
        f"there are enough. When all have ended, print a line NUMBER{mark}STATUS for each command, in the order of the "
        "lines: the number of its line, from 1, and its exit status. It is run with other commands too.",
        files={"commands.txt": lines(visible[0])},
        solution=f"cat > {script} <<'CONTENT'\n{python(program).replace('python3 -', 'python3 - $*')}CONTENT\n",
        checks=run_case(
            f"bash {hidden}.sh",
            files={f"{hidden}.sh": driver, f"{hidden}.txt": lines(texts)},
            remove=["log"],
            stdout=lines([*found, f"most {most} left 0"]),
            timeout_s=30,
        ),
    )


FAMILY = Family(
    name="processes",
    summary="Run programs, inspect and signal running ones, and write scripts that supervise them.",
    kinds={
        1: (_output, _status, _variable),
        2: (_argument, _environment, _failed, _signal),
        3: (_workers, _folders, _limits),
        4: (_parallel, _retry),
        5: (_stop, _pool),
    },
)
