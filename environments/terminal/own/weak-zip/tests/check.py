"""Decrypts the archive, looks at the parameters of its encryption, and searches for forgotten files."""

import hashlib
import re

from harness import WORK, as_agent, private_folder, read, require, run

PASSWORD = "Winter87+"
FILES = {
    "accounts.csv": "e31251c9b2c47804e268b773be342fd0ef19103007715fd4dd02fa4c3daa78b2",
    "notes.txt": "4eb4ee65bb5bbf299353892ddd15b01e2c5b36aef258d8a6261e2f1ad0105639",
    "seal.bin": "7f47981f3d6173df5a982acebb6d2fb6d6b2a65d5bb6601aa374305efd2c5b68",
}
"""SHA-256 of the files of the archive."""


def verify():
    require(read(WORK / "password.txt").strip() == PASSWORD, "password.txt is wrong")
    folder = private_folder()
    env = {"GNUPGHOME": str(folder)}
    phrase = ["--batch", "--pinentry-mode", "loopback", "--passphrase-file", WORK / "passphrase.txt"]
    archive = WORK / "records.tar.gpg"
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
        contents = [path.read_bytes() for path in found.values()]
        require(hashes == FILES, f"the archive has other content: {hashes}")
        for path in WORK.rglob("*"):
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                hidden = any(one in content for one in contents) or b"PK\3\4" in content
                require(not hidden, f"{path} has content of the archive, or is one")
