"""Acts as the service, as operators and as a stranger, and looks at what each can do."""

import stat
import subprocess
from pathlib import Path

from harness import require

ROOT = Path("/srv/ledger")
USERS = {"ledger": (1500, 1500, []), "ada": (1501, 1501, [1500]), "bob": (1502, 1502, [1500]), "eve": (1503, 1503, [])}
PROGRAM = "bc57969e421e8e9d516edfd7011f81c52b4a35c8910df7f136b49ca81333c166"
"""SHA-256 of the program."""


def can(user, command):
    """Return whether a command of the shell succeeds for a user."""
    uid, gid, groups = USERS[user]
    env = {"PATH": "/usr/bin:/bin"}
    argv = ["/bin/sh", "-c", f"umask 027; cd {ROOT} && {command}"]
    done = subprocess.run(
        argv, user=uid, group=gid, extra_groups=groups, env=env, cwd="/", timeout=20, check=False, capture_output=True
    )
    return done.returncode == 0


def expect(allowed, command, *users):
    """Require that exactly these users can run a command."""
    for user in users:
        require(can(user, command) == allowed, f"{user} {'cannot' if allowed else 'can'}: {command}")


def verify():
    found = subprocess.run(["/usr/bin/sha256sum", ROOT / "bin/ledger"], capture_output=True, text=True, check=True)
    require(found.stdout.split()[0] == PROGRAM, "the program was changed")
    require((ROOT / "etc/ledger.conf").read_text() == "currency=EUR\n", "ledger.conf was changed")
    require((ROOT / "etc/secret.key").read_text() == "3f9a66b01c2d77e4\n", "secret.key was changed")
    for path in [ROOT, *ROOT.rglob("*")]:
        mode = path.lstat().st_mode
        require(not stat.S_ISLNK(mode) and not mode & stat.S_IWOTH, f"{path} is a link or writable by everyone")
        require(not (stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID)), f"{path} is set-user-ID")

    everyone, staff, operators = ("ledger", "ada", "bob", "eve"), ("ledger", "ada", "bob"), ("ada", "bob")
    expect(True, "echo 40 > inbox/a1", "ada")
    expect(True, "echo 2 > inbox/b1", "bob")
    expect(True, "cat inbox/a1 inbox/b1 && ls inbox", *staff)
    expect(False, "echo 3 >> inbox/a1", "bob", "eve")
    expect(False, "rm -f inbox/a1", "bob", "eve")
    expect(False, "ls inbox || cat inbox/a1", "eve")
    expect(True, "bin/ledger", "ledger")
    require((ROOT / "public/total.txt").read_text() == "EUR 42\n", "the service has not published its total")
    require(not list((ROOT / "inbox").iterdir()), "the service has not emptied its inbox")
    expect(True, "grep 42 log/ledger.log && grep 40 data/a1 && ls data log", *staff)
    expect(False, "cat log/ledger.log || cat data/a1 || ls data || ls log", "eve")
    expect(
        False,
        "touch data/x || touch log/x || rm -f data/a1 || echo >> log/ledger.log || echo >> data/a1",
        *operators,
        "eve",
    )
    expect(True, "touch data/x log/x public/x && rm data/x log/x public/x", "ledger")
    expect(True, "cat public/index.txt public/total.txt && ls public . ", *everyone)
    expect(
        False, "touch public/y || echo >> public/index.txt || rm -f public/total.txt || touch ./y", *operators, "eve"
    )
    expect(False, "touch ./y || rm -rf etc || mv etc other", "ledger")
    expect(True, "test -r bin/ledger && test -x bin/ledger && ls bin etc && cat etc/ledger.conf", *staff)
    expect(False, "ls bin || ls etc || test -r bin/ledger || test -x bin/ledger || cat etc/ledger.conf", "eve")
    expect(True, "cat etc/secret.key", "ledger")
    expect(False, "cat etc/secret.key", *operators, "eve")
    change = "touch bin/x || echo >> bin/ledger || chmod 777 bin/ledger || touch etc/x || echo >> etc/ledger.conf"
    expect(False, f"{change} || chmod 777 etc/ledger.conf || rm -f etc/secret.key || echo >> etc/secret.key", *everyone)
    expect(True, "echo 1 > inbox/a2", "ada")
    expect(False, "mv inbox/a2 inbox/a3", "bob")
    expect(True, "rm inbox/a2", "ada")
