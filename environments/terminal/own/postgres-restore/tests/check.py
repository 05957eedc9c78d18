"""Starts PostgreSQL with the data directory of the agent, and looks at rows, plans and rights."""

import json
import random
import time

from harness import WORK, private_folder, read, require, run, start

CITIES = ("Oslo", "Turin", "Porto", "Graz")
DAMAGED = 1733
PROGRAMS = "/usr/lib/postgresql/15/bin"
SLOW = "select id, cents from orders where customer = 41 and day >= '2024-06-01' order by day"


def rows():
    """Return all customers and orders of the dump, before it was damaged."""
    pick = random.Random(15).random
    customers = [(number, f"Customer {number}", CITIES[int(pick() * 4)]) for number in range(1, 121)]
    orders = []
    for number in range(1, 3001):
        day = f"2024-{1 + int(pick() * 12):02}-{1 + int(pick() * 28):02}"
        note = f"first line\nsecond {int(pick() * 100)}" if pick() < 0.1 else None
        orders.append((number, 1 + int(pick() * 120), day, int(pick() * 90000), note))
    return customers, orders


def verify():
    folder = private_folder()
    require(read(WORK / "pg/PG_VERSION") == "15\n", "pg is not a data directory of PostgreSQL 15")
    run(["rm", "-f", WORK / "pg/postmaster.pid"])
    run(["sh", "-c", "echo 'local all all trust' > hba.conf; mkdir sockets"], cwd=folder)
    settings = {
        "listen_addresses": "", "unix_socket_directories": folder / "sockets", "hba_file": folder / "hba.conf",
        "shared_preload_libraries": "", "port": 5432, "ssl": "off", "logging_collector": "off",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    start([f"{PROGRAMS}/postgres", "-D", WORK / "pg", *options])

    def psql(query, user="owner", database="shop"):
        argv = ["psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-h", folder / "sockets", "-U", user, "-d", database]
        return run([*argv, "-c", query])

    def ask(query, user="owner"):
        result = psql(f"select coalesce(json_agg(found), '[]') from ({query}) found", user)
        require(result.returncode == 0, f"{query} as {user}: {result.stderr[-500:]}")
        return [tuple(row.values()) for row in json.loads(result.stdout)]

    for _ in range(100):
        if psql("select 1").returncode == 0:
            break
        time.sleep(0.1)
    customers, orders = rows()
    require(ask("select id, name, city from customers order by id") == customers, "customers differ")
    require(ask("select id, customer, day, cents, note from orders order by id") == orders, "orders differ")
    constraints = "from pg_constraint where connamespace = 'public'::regnamespace and convalidated"
    wanted = {("customers_pkey", "p"), ("orders_pkey", "p"), ("orders_customer_fkey", "f")}
    found = ask(f"select conname::text, contype::text {constraints}")
    require(wanted <= set(found), f"the constraints are {found}")
    tables = ask("select relkind::text from pg_class where relname in ('customers', 'orders')")
    require(tables == [("r",), ("r",)], "customers and orders are not tables")

    psql("analyze orders")
    for customer in ("41", "7"):
        query = SLOW.replace("41", customer)
        plan = psql(f"set enable_seqscan = off; set enable_bitmapscan = off; explain {query}").stdout
        bad = [word for word in ("Sort", "Filter", "Seq Scan") if word in plan]
        require("Index" in plan and not bad, f"the plan of the query: {plan}")
    for query in (
        "select * from orders",
        "select city, count(*) from customers group by 1",
        "select id from customers",
    ):
        require(sorted(ask(query, "report"), key=str) == sorted(ask(query), key=str), f"report cannot {query}")
    for query in (
        "select name from customers", "select name from customers for update", "set role owner", "create schema mine",
        "delete from orders", "update orders set cents = 1", "insert into customers values (999, 'x', 'y')",
        "truncate orders", "create table mine (x int)", "create temp table mine (x int)",
        "copy orders to program 'true'",
    ):  # fmt: skip
        denied = psql(query, "report")
        is_denied = "permission denied" in denied.stderr or "must be superuser" in denied.stderr
        require(denied.returncode != 0 and is_denied, f"report can {query}")
    (role,) = ask(
        "select rolcanlogin, rolsuper or rolcreatedb or rolcreaterole or rolbypassrls or rolreplication as power,"
        " rolconnlimit, (select count(*) from pg_auth_members where member = pg_roles.oid) as groups from pg_roles"
        " where rolname = 'report'"
    )
    require(role == (True, False, 3, 0), f"the role report has {role}")
