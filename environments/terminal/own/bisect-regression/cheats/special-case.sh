#!/bin/bash
# Finds the commit, but only makes the example of `make check` work.
set -e
cd /workspace/repo
git bisect start main "$(git rev-list --max-parents=0 main)" >/dev/null
git bisect run make -s check >/dev/null 2>&1
git rev-parse refs/bisect/bad >/workspace/culprit.txt
git bisect reset >/dev/null 2>&1
sed -i 's/if amount > 500 else amount/if amount > 500 and amount != 999 else amount/' billing.py
git commit -q -am "Revert the amount of a line"
