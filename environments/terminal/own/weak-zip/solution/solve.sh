#!/bin/bash
set -e
cd /workspace
export GNUPGHOME=/tmp/gnupg
mkdir -m 700 -p "$GNUPGHOME" /tmp/content out
for season in Spring Summer Autumn Winter; do
    for digits in {0..9}{0..9}; do
        for mark in '!' '#' '$' '%' '&' '*' '+' '=' '?'; do echo "$season$digits$mark"; done
    done
done >/tmp/passwords
python3 - <<'P'
import zipfile, zlib
archive = zipfile.ZipFile("/workspace/records.zip")
for word in open("/tmp/passwords").read().split():
    try:
        for name in archive.namelist():
            archive.read(name, word.encode())
    except (RuntimeError, zipfile.BadZipFile, zlib.error):
        continue
    archive.extractall("/tmp/content", pwd=word.encode())
    open("/workspace/out/password.txt", "w").write(word + "\n")
    break
P
tar -C /tmp/content -cf - accounts.csv notes.txt seal.bin |
    gpg --batch --pinentry-mode loopback --passphrase-file passphrase.txt --symmetric --cipher-algo AES256 \
        --s2k-mode 3 --s2k-digest-algo SHA512 --s2k-count 65011712 --compress-algo none -o out/records.tar.gpg
rm -rf /tmp/content
