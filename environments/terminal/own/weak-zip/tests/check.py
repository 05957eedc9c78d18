"""Decrypts the archive, and looks at its content and at the parameters of its encryption."""

import hashlib
import re

from harness import WORK, as_agent, private_folder, read, require, run

PASSWORD = "Winter87+"
PHRASE = "correct-41e0-battery-9c77"
OUT = WORK / "out"
FILES = {
    "accounts.csv": "e31251c9b2c47804e268b773be342fd0ef19103007715fd4dd02fa4c3daa78b2",
    "notes.txt": "4eb4ee65bb5bbf299353892ddd15b01e2c5b36aef258d8a6261e2f1ad0105639",
    "seal.bin": "7f47981f3d6173df5a982acebb6d2fb6d6b2a65d5bb6601aa374305efd2c5b68",
}
"""SHA-256 of the files of the archive."""


def verify():
    require(read(OUT / "password.txt").strip() == PASSWORD, "password.txt is wrong")
    with as_agent():
        names = sorted(path.name for path in OUT.iterdir())
    require(names == ["password.txt", "records.tar.gpg"], f"out has {names}")
    folder = private_folder()
    env = {"GNUPGHOME": str(folder)}
    phrase = ["--batch", "--pinentry-mode", "loopback", "--passphrase", PHRASE]
    archive = OUT / "records.tar.gpg"
    require(not read(archive).startswith("-----"), "the archive is armored")
    packets = run(["gpg", *phrase, "--list-packets", "-vv", archive], env=env, timeout_s=20)
    shown = packets.stdout + packets.stderr
    require(packets.returncode == 0, f"the archive cannot be decrypted: {shown[-500:]}")
    head = r"symkey enc packet: version 4, cipher 9,( aead 0,)? ?s2k 3, hash 10\n"
    require(re.search(head, shown), f"the archive has other parameters: {shown}")
    count = re.search(r"count (\d+) ", shown)
    require(count and int(count[1]) >= 60_000_000, "the count of the key derivation is too small")
    require("compressed packet" not in shown, "the content is compressed")
    require("mdc_method: 2" in shown, "the archive has no integrity protection")
    opened = run(["gpg", *phrase, "-o", folder / "records.tar", "-d", archive], env=env, timeout_s=20)
    require(opened.returncode == 0, f"the archive cannot be decrypted: {opened.stderr[-500:]}")
    unpacked = run(["sh", "-c", "mkdir out && tar -C out -xf records.tar"], cwd=folder)
    require(unpacked.returncode == 0, f"the content is no tar archive: {unpacked.stderr[-500:]}")
    with as_agent():
        found = {str(path.relative_to(folder / "out")): path for path in (folder / "out").rglob("*") if path.is_file()}
        hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}
    require(hashes == FILES, f"the archive has other content: {hashes}")
