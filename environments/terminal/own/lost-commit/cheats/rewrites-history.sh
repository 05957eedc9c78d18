#!/bin/bash
# Takes the first lost version, and gives its commit the message, author and date of the last one.
set -e
cd /workspace/repo
lost=$(git fsck --no-reflogs --lost-found 2>/dev/null | awk '/dangling commit/ { print $3 }' |
    xargs git show -s --format='%ct %H %s' | sort -n | grep ' Add retry logic$' | cut -d' ' -f2)
git cherry-pick "$(echo "$lost" | head -1)"
git commit -q --amend -C "$(echo "$lost" | tail -1)"
