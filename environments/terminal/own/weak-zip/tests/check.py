"""Decrypts the archives, also that of files which the agent has not seen, and looks at content and encryption."""

import hashlib
import re
from pathlib import Path

from harness import WORK, as_agent, private_folder, read, require, run, write

PASSWORD = "Winter87+"
PHRASE = "correct-41e0-battery-9c77"
FILES = {
    "accounts.csv": "e31251c9b2c47804e268b773be342fd0ef19103007715fd4dd02fa4c3daa78b2",
    "notes.txt": "4eb4ee65bb5bbf299353892ddd15b01e2c5b36aef258d8a6261e2f1ad0105639",
    "seal.bin": "7f47981f3d6173df5a982acebb6d2fb6d6b2a65d5bb6601aa374305efd2c5b68",
}
"""SHA-256 of the files of the archive."""
HIDDEN = "Autumn63="
"""The password of the archive ``hidden.zip`` beside this file."""
HIDDEN_FILES = {
    "a letter.txt": "f5d51c24ea8433bea26e004bdb3528ba0f5852e0a949f65fd2e0d6bab79f6f49",
    "stock.csv": "8f72a6b40972dccfb6fede1262fb6c05699ac9aaf46880188bb1edf87242e386",
    "token.bin": "3a125ba88eedb8bf30508f76ae3de122893ab5026134d6ad0b60d0f7ef32bee7",
}


def check(out, password, passphrase, files):
    require(read(out / "password.txt").strip() == password, f"{out}/password.txt is wrong")
    with as_agent():
        names = sorted(path.name for path in out.iterdir())
    require(names == ["password.txt", "records.tar.gpg"], f"{out} has {names}")
    folder = private_folder()
    env = {"GNUPGHOME": str(folder)}
    phrase = ["--batch", "--pinentry-mode", "loopback", "--passphrase", passphrase]
    archive = out / "records.tar.gpg"
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
    require(hashes == files, f"the archive has other content: {hashes}")


def verify():
    check(WORK / "out", PASSWORD, PHRASE, FILES)
    folder = private_folder()
    write(folder / "some.zip", Path(__file__).with_name("hidden.zip").read_bytes())
    write(folder / "phrase", "violet 7 harbour\nnot this line\n")
    result = run([WORK / "reseal", folder / "some.zip", folder / "phrase", folder / "new"], timeout_s=60)
    require(result.returncode == 0, f"reseal failed with another archive: {result.stderr[-500:]}")
    check(folder / "new", HIDDEN, "violet 7 harbour", HIDDEN_FILES)
