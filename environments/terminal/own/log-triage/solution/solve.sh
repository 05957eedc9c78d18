#!/bin/bash
set -e
cat > /workspace/triage <<'P'
#!/bin/sh
export LC_ALL=C
awk '
BEGIN { split("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec", names, " "); for (i in names) number[names[i]] = i }
function quoted(text) { return match(text, /^"([^"\\]|\\.)*"/) ? RLENGTH : 0 }
{
    if (!match($0, /^[^ ]+ [^ ]+ [^ ]+ \[[0-9][0-9]\/[A-Z][a-z][a-z]\/[0-9][0-9][0-9][0-9](:[0-9][0-9])+ \+0000\] /)) next
    head = substr($0, 1, RLENGTH); rest = substr($0, RLENGTH + 1)
    if (!(n = quoted(rest))) next
    rest = substr(rest, n + 1)
    if (!match(rest, /^ [0-9][0-9][0-9] ([0-9]+|-) /)) next
    split(substr(rest, 1, RLENGTH), numbers, " "); rest = substr(rest, RLENGTH + 1)
    if (!(n = quoted(rest)) || substr(rest, n + 1, 1) != " ") next
    rest = substr(rest, n + 2)
    if (!(n = quoted(rest)) || n != length(rest)) next
    split(head, words, " "); split(substr(words[4], 2), time, /[\/:]/)
    requests[words[1]]++; bytes[words[1]] += numbers[2]
    minute = sprintf("%s-%02d-%sT%s:%s", time[3], number[time[2]], time[1], time[4], time[5])
    total[minute]++; if (numbers[1] >= 500 && numbers[1] < 600) errors[minute]++
}
END {
    for (address in requests) print "client", address, requests[address], bytes[address] + 0 | "sort -k3,3nr -k2,2 | head -5"
    close("sort -k3,3nr -k2,2 | head -5")
    for (minute in total) if (total[minute] >= 20 && 10 * errors[minute] >= total[minute])
        print "burst", minute, errors[minute], total[minute] | "sort"
}' "$1"
P
chmod +x /workspace/triage
/workspace/triage /workspace/access.log > /workspace/report.txt
