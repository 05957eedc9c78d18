#!/bin/bash
# Finds the commit, but takes the file of before it, without the later changes.
set -e
cat >/workspace/repair <<'P'
#!/bin/bash
set -e
cd "$1"
git bisect start main "$(git rev-list --max-parents=0 main)" >/dev/null
git bisect run make -s check >/dev/null 2>&1
culprit=$(git rev-parse refs/bisect/bad)
git bisect reset >/dev/null 2>&1
git checkout -q "$culprit~1" -- "$2"
git commit -q -m "Revert the changes of $culprit to $2"
echo "$culprit"
P
chmod +x /workspace/repair
/workspace/repair /workspace/repo billing.py >/workspace/culprit.txt
