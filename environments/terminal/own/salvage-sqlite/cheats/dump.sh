#!/bin/bash
# What `.dump` can read, with all the rest called lost.
cd /workspace
sqlite3 measurements.db .dump 2>/dev/null | grep 'INSERT INTO' | sed 's/INSERT/INSERT OR IGNORE/' >/tmp/rows.sql
sqlite3 recovered.db 'create table measurements(id INTEGER PRIMARY KEY, host TEXT, reading REAL, note TEXT)'
sqlite3 recovered.db </tmp/rows.sql
sqlite3 recovered.db 'select id from measurements' | sort >/tmp/found
seq 3000 | sort | comm -23 - /tmp/found | sort -n >lost.txt
