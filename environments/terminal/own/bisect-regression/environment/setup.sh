#!/bin/sh
# Makes a repository of 40 commits. Every commit is the same on each machine.
set -e
mkdir repo
cd repo
git init -q -b main
git config user.name Robin
git config user.email robin@example.com
number=0
commit() {
    number=$((number + 1))
    date=$((1714600000 + 3600 * number))
    git add -A
    GIT_AUTHOR_DATE="$date +0000" GIT_COMMITTER_DATE="$date +0000" git commit -q -m "$1"
}
cat >billing.py <<'P'
"""Adds up the lines of a bill: ``python3 billing.py < bill`` reads ``QUANTITY PRICE-IN-CENTS NAME`` per line."""

import sys


def cents_of(line):
    quantity, price, _ = line.split(maxsplit=2)
    return int(quantity) * int(price)


def discount(cents):
    return cents // 20 if cents >= 10000 else 0


def total(lines):
    cents = sum(cents_of(line) for line in lines if line.strip())
    return cents - discount(cents)


if __name__ == "__main__":
    cents = total(sys.stdin)
    print(f"{cents // 100}.{cents % 100:02}")
P
printf '2 150 tea\n1 999 cup\n' >example.bill
printf '.PHONY: check\ncheck:\n\ttest "$$(python3 -B billing.py < example.bill)" = 12.99\n' >Makefile
commit 'Add up bills'
for topic in tea cups plates spoons pots trays sugar milk cocoa; do
    printf -- '- %s\n' "$topic" >>NOTES
    commit "Note $topic"
done
sed -i 's/quantity, price, _ = line.split(maxsplit=2)/quantity, price = line.split()[:2]/' billing.py
commit 'Allow lines without a name'
for topic in jam bread rolls butter honey cake; do
    printf -- '- %s\n' "$topic" >>NOTES
    commit "Note $topic"
done
sed -i 's/    return int(quantity) \* int(price)/    amount = int(quantity) * int(price)\n    return round(amount, -1) if amount > 500 else amount/' billing.py
printf 'Amounts are in cents.\n' >UNITS
commit 'Simplify the amount of a line'
for topic in salt pepper oil vinegar mustard; do
    printf -- '- %s\n' "$topic" >>NOTES
    commit "Note $topic"
done
sed -i 's/    cents = total(sys.stdin)/    lines = [line for line in sys.stdin if not line.startswith("#")]\n    cents = total(lines)/' billing.py
commit 'Skip comments'
for topic in rice beans lentils peas corn; do
    printf -- '- %s\n' "$topic" >>NOTES
    commit "Note $topic"
done
sed -i 's/cents >= 10000 else 0/cents > 10000 else 0/' billing.py
commit 'Start the discount above 100'
for topic in apples pears plums figs dates grapes limes; do
    printf -- '- %s\n' "$topic" >>NOTES
    commit "Note $topic"
done
printf 'Amounts are in cents. Discounts are in whole cents.\n' >UNITS
commit 'Say what discounts are in'
