#!/bin/bash
# Finds the commit, but takes the file of before it, without the later changes.
set -e
cd /workspace/repo
git bisect start main "$(git rev-list --max-parents=0 main)" >/dev/null
git bisect run make -s check >/dev/null 2>&1
culprit=$(git rev-parse refs/bisect/bad)
echo "$culprit" >/workspace/culprit.txt
git bisect reset >/dev/null 2>&1
git checkout -q "$culprit~1" -- billing.py
git commit -q -m "Revert the amount of a line"
