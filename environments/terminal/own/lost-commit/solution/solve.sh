#!/bin/bash
set -e
cd /workspace/repo
lost=$(git fsck --no-reflogs --lost-found 2>/dev/null | awk '/dangling commit/ { print $3 }' |
    xargs git show -s --format='%ct %H %s' | sort -n | awk '/ Add retry logic$/ { last = $2 } END { print last }')
git cherry-pick "$lost"
