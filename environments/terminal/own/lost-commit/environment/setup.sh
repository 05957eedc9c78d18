#!/bin/sh
# Makes the repository. Every commit is the same on each machine.
set -e
mkdir repo
cd repo
git init -q -b main
git config user.name Robin
git config user.email robin@example.com
minute=10
commit() {
    minute=$((minute + 1))
    git add -A
    GIT_AUTHOR_DATE="2024-05-02T09:$minute:00Z" GIT_COMMITTER_DATE="2024-05-02T09:$minute:00Z" git commit -q "$@"
}
client() {
    cat >net.py <<P
"""Fetches pages."""

import urllib.request

ATTEMPTS = $1


def fetch(url):
    for attempt in range(ATTEMPTS):
        try:
            return urllib.request.urlopen(url, timeout=$2).read()
        except OSError:
            if attempt == ATTEMPTS - 1:
                raise
P
}
printf '"""Fetches pages."""\n\nimport urllib.request\n\n\ndef fetch(url):\n    return urllib.request.urlopen(url).read()\n' >net.py
commit -m 'Fetch pages'
printf 'fetch: reads pages\n' >README
commit -m 'Add a readme'
client 3 5
printf 'attempts are logged\n' >RETRY
commit -m 'Add retry logic'
client 4 5
commit --amend -m 'Add retry logic'
client 5 2
printf 'The number of attempts is fixed.\n' >RETRY
commit --amend -m 'Add retry logic'
git reset -q --hard HEAD~1
printf 'fetch: reads pages over HTTP\n' >README
commit -m 'Say which protocol'
git checkout -q -b experiment
client 9 60
commit -m 'Try retry logic with long timeouts'
git checkout -q main
git branch -q -D experiment
printf '*.pyc\n' >.gitignore
commit -m 'Ignore compiled files'
git reflog expire --expire=now --all
rm -f .git/ORIG_HEAD
