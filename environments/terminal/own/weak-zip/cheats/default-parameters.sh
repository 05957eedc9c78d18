#!/bin/bash
# Encrypts with the defaults of GnuPG, under the right names.
set -e
cat >/workspace/reseal <<'P'
#!/bin/bash
set -e
export GNUPGHOME=$(mktemp -d)
mkdir "$GNUPGHOME/content" "$3"
for season in Spring Summer Autumn Winter; do
    for digits in {0..9}{0..9}; do
        for mark in '!' '#' '$' '%' '&' '*' '+' '=' '?'; do echo "$season$digits$mark"; done
    done
done | python3 -c '
import sys, zipfile, zlib
archive = zipfile.ZipFile(sys.argv[1])
for word in sys.stdin.read().split():
    try:
        archive.extractall(sys.argv[2], pwd=word.encode())
    except (RuntimeError, zipfile.BadZipFile, zlib.error):
        continue
    print(word)
    break
' "$1" "$GNUPGHOME/content" >"$3/password.txt"
(cd "$GNUPGHOME/content" && tar -cf - -- *) |
    gpg --batch --pinentry-mode loopback --passphrase-file "$2" --symmetric \
        --compress-algo none -o "$3/records.tar.gpg"
rm -rf "$GNUPGHOME/content"
P
chmod +x /workspace/reseal
cd /workspace
./reseal records.zip passphrase.txt out
