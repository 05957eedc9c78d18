"""Starts the server, and logs in as the user may and as nobody may."""

import secrets
import stat
import subprocess
import time
from pathlib import Path

from harness import require, start

HOMES = {1000: Path("/home/deploy"), 1001: Path("/home/reader")}
SSHD = ["/usr/sbin/sshd", "-f", HOMES[1000] / "sshd/config"]


def call(uid, *argv, stdin=""):
    """Run a program as a user, and return its result."""
    env = {"HOME": str(HOMES[uid]), "PATH": "/usr/bin:/bin"}
    user = {"user": uid, "group": uid, "extra_groups": [], "cwd": "/", "env": env}
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=15, check=False, **user)


def ssh(*arguments, stdin=""):
    return call(1001, "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", *arguments, stdin=stdin)


def verify():
    count = f"{secrets.token_hex(4)} crates"
    (HOMES[1000] / "stock.txt").write_text(f"{count}\n")
    shown = f"stock of deploy: {count}\n"
    for path in (HOMES[1000] / "sshd/host_key", HOMES[1001] / ".ssh/id_ed25519"):
        require(path.is_file() and not stat.S_IMODE(path.lstat().st_mode) & 0o077, f"others can read {path}")
    settings = call(1000, *map(str, SSHD), "-T").stdout.splitlines()
    for line in (
        "passwordauthentication no", "kbdinteractiveauthentication no", "pubkeyauthentication yes", "strictmodes yes",
        "port 2222", "listenaddress 127.0.0.1:2222", "hostkey /home/deploy/sshd/host_key",
        "authorizedkeysfile /home/deploy/sshd/authorized_keys", "authorizedkeyscommand none", "usepam no",
    ):  # fmt: skip
        require(line in settings, f"the server's settings lack {line!r}: {settings}")
    require(len([line for line in settings if line.startswith("hostkey ")]) == 1, "there is another host key")
    client = call(1001, "ssh", "-G", "report").stdout.splitlines()
    require("stricthostkeychecking true" in client, "the client does not check host keys strictly")

    start([*SSHD, "-D"], cwd="/")
    for _ in range(50):
        if call(1001, "ssh-keyscan", "-p", "2222", "127.0.0.1").stdout:
            break
        time.sleep(0.1)
    for command in ([], ["id"], ["cat /etc/passwd; exit 3"], ["-s", "sftp"]):
        options, words = (command[:1], command[1:]) if command[:1] == ["-s"] else ([], command)
        result = ssh(*options, "report", *words)
        require(result.stdout == shown, f"ssh report {command} prints {result.stdout!r} {result.stderr[-500:]}")
    terminal = ssh("-tt", "report", "tty")
    require("PTY allocation request failed" in terminal.stderr, "the key can have a terminal")
    forward = ssh("-W", "127.0.0.1:2222", "report", stdin="SSH-2.0-x\r\n")
    require("SSH-2.0" not in forward.stdout, "the key can forward ports")
    remote = ssh("-o", "ExitOnForwardFailure=yes", "-R", "2300:127.0.0.1:2222", "report")
    require(remote.returncode != 0 and "forwarding failed" in remote.stderr, "the key can forward ports of the server")
    agent = ssh("-v", "-A", "report")
    require(agent.stdout == shown, f"a client with an agent fails: {agent.stderr[-500:]}")

    folder = Path("/tmp/other-key")
    call(1001, "rm", "-rf", str(folder))
    call(1001, "mkdir", "-m", "700", str(folder))
    call(1001, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    other = ssh(
        "-o",
        "IdentitiesOnly=yes",
        "-i",
        str(folder / "key"),
        "-F",
        "none",
        "-p",
        "2222",
        "-o",
        "StrictHostKeyChecking=no",
        "deploy@127.0.0.1",
    )
    require("Permission denied (publickey)" in other.stderr, f"another key works: {other.stdout} {other.stderr[-500:]}")
    keys = (HOMES[1000] / "sshd/authorized_keys").read_text().splitlines()
    keys = [line for line in keys if line.strip() and not line.startswith("#")]
    public = call(1001, "ssh-keygen", "-y", "-f", str(HOMES[1001] / ".ssh/id_ed25519")).stdout.split()[:2]
    require(len(keys) == 1 and " ".join(public) in keys[0], f"the authorized keys are {keys}")
    require(public[0] == "ssh-ed25519", "the key has another type")
    options = keys[0].partition(" ssh-ed25519 ")[0].lower()
    require(
        "restrict" in options
        or {"no-agent-forwarding", "no-x11-forwarding"} <= set(options.split(","))
        or {"allowagentforwarding no", "x11forwarding no"} <= set(settings),
        "agents or X11 can be forwarded",
    )
    for uid, path in (
        (1001, "/home/deploy/stock.txt"),
        (1001, "/home/deploy/sshd/host_key"),
        (1000, "/home/reader/.ssh/id_ed25519"),
    ):
        require(call(uid, "cat", path).returncode != 0, f"user {uid} can read {path}")
    require(call(1001, "touch", "/home/deploy/x", "/home/deploy/sshd/x").returncode != 0, "reader can write for deploy")
