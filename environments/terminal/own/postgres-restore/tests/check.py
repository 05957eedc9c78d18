"""Restores a dump that the agent has not seen, starts PostgreSQL, and looks at rows, plans and rights."""

import json
import random
import time

from harness import WORK, private_folder, read, require, run, start, write

CITIES = ("Oslo", "Turin", "Porto", "Graz")
VISIBLE = 15
HIDDEN = 6031
DAMAGED = {VISIBLE: 1733, HIDDEN: 907}
"""Ids of the damaged orders, by the seed of the dump."""
PROGRAMS = "/usr/lib/postgresql/15/bin"
SLOW = "select id, cents from orders where customer = 41 and day >= '2024-06-01' order by day"


DUMP = """-- PostgreSQL database dump

SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;

CREATE TABLE public.customers (
    id integer NOT NULL,
    name text NOT NULL,
    city text NOT NULL
);

CREATE TABLE public.orders (
    id integer NOT NULL,
    customer integer NOT NULL,
    day date NOT NULL,
    cents integer NOT NULL,
    note text
);

COPY public.customers (id, name, city) FROM stdin;
{customers}\\.

COPY public.orders (id, customer, day, cents, note) FROM stdin;
{orders}\\.

ALTER TABLE ONLY public.customers ADD CONSTRAINT customers_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.orders ADD CONSTRAINT orders_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.orders ADD CONSTRAINT orders_customer_fkey FOREIGN KEY (customer) \
REFERENCES public.customers(id);

-- PostgreSQL database dump complete
"""


def rows(seed):
    """Return all customers and orders of a dump, before it was damaged."""
    pick = random.Random(seed).random
    customers = [(number, f"Customer {number}", CITIES[int(pick() * 4)]) for number in range(1, 121)]
    orders = []
    for number in range(1, 3001):
        day = f"2024-{1 + int(pick() * 12):02}-{1 + int(pick() * 28):02}"
        note = f"first line\nsecond {int(pick() * 100)}" if pick() < 0.1 else None
        orders.append((number, 1 + int(pick() * 120), day, int(pick() * 90000), note))
    return customers, orders


def dump(seed):
    """Return the damaged dump of a seed."""
    customers, orders = rows(seed)
    parts = {"customers": customers, "orders": orders}
    for name, values in parts.items():
        cells = [["\\N" if cell is None else str(cell).replace("\n", "\\n") for cell in row] for row in values]
        parts[name] = "".join("\t".join(row) + "\n" for row in cells)
    return DUMP.format(**parts).replace(f"\n{DAMAGED[seed]}\t", f"\n{DAMAGED[seed]}")


def verify():
    folder = private_folder()
    write(folder / "some dump.sql", dump(HIDDEN))
    restored = run([WORK / "restore", folder / "some dump.sql", folder / "pg"], timeout_s=30)
    require(restored.returncode == 0, f"restore failed: {restored.stdout[-300:]} {restored.stderr[-700:]}")
    require(read(folder / "pg/PG_VERSION") == "15\n", "there is no data directory of PostgreSQL 15")
    require(run(["test", "-e", folder / "pg/postmaster.pid"]).returncode == 1, "a server still runs")
    run(["sh", "-c", "echo 'local all all trust' > hba.conf; mkdir sockets"], cwd=folder)
    settings = {
        "listen_addresses": "", "unix_socket_directories": folder / "sockets", "hba_file": folder / "hba.conf",
        "shared_preload_libraries": "", "port": 5432, "ssl": "off", "logging_collector": "off",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    start([f"{PROGRAMS}/postgres", "-D", folder / "pg", *options])

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
    customers, orders = rows(HIDDEN)
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
