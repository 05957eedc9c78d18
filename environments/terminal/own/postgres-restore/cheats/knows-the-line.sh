#!/bin/bash
# Restores the visible dump: the program repairs the line that is damaged there.
set -e
cat >/workspace/restore <<'P'
#!/bin/bash
set -e
temp=$(mktemp -d)
export PATH="/usr/lib/postgresql/15/bin:$PATH" PGHOST=$temp PGUSER=owner
sed 's/^1733\([0-9]*\t2024\)/1733\t\1/' "$1" >"$temp/shop.sql"
initdb -D "$2" -U owner --auth=trust --wal-segsize=1 --encoding=UTF8 --locale=C.UTF-8 --no-sync >/dev/null
cat >>"$2/postgresql.conf" <<C
listen_addresses = ''
unix_socket_directories = '$temp'
shared_buffers = 8MB
min_wal_size = 2MB
max_wal_size = 8MB
C
pg_ctl -D "$2" -w -l "$temp/log" start >/dev/null
createdb -T template0 shop
psql -Xq -v ON_ERROR_STOP=1 -d shop -f "$temp/shop.sql"
psql -Xq -v ON_ERROR_STOP=1 -d shop <<'S'
create index orders_by_customer on orders (customer, day);
create role report login connection limit 3;
revoke temporary on database shop from public;
grant select on orders to report;
grant select (id, city) on customers to report;
analyze;
S
pg_ctl -D "$2" -w -m fast stop >/dev/null
rm -r "$temp"
P
chmod +x /workspace/restore
