#!/bin/bash
set -e
cd /workspace/repo
git bisect start main "$(git rev-list --max-parents=0 main)" >/dev/null
git bisect run make -s check >/dev/null 2>&1
culprit=$(git rev-parse refs/bisect/bad)
git bisect reset >/dev/null 2>&1
echo "$culprit" >/workspace/culprit.txt
git diff "$culprit" "$culprit~1" -- billing.py | git apply --3way --index
git commit -q -m "Revert the rounding of amounts"
