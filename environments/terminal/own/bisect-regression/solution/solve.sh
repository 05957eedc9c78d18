#!/bin/bash
set -e
cat >/workspace/repair <<'P'
#!/bin/bash
set -e
cd "$1"
git bisect start main "$(git rev-list --max-parents=0 main)" >/dev/null
git bisect run make -s check >/dev/null 2>&1
culprit=$(git rev-parse refs/bisect/bad)
git bisect reset >/dev/null 2>&1
git diff "$culprit" "$culprit~1" -- "$2" | git apply --3way --index
git commit -q -m "Revert the changes of $culprit to $2"
echo "$culprit"
P
chmod +x /workspace/repair
/workspace/repair /workspace/repo billing.py >/workspace/culprit.txt
