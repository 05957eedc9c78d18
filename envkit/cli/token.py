"""``envkit token``: who may use a server."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from envkit.errors import UsageError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

app = typer.Typer(no_args_is_help=True, help="Make and revoke tokens of a server.", rich_markup_mode=None)

State = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the server's state; $XDG_STATE_HOME/envkit unless given."),
]


@app.command("create")
def create(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Who owns what is made with the token.")],
    scopes: Annotated[
        str, typer.Option(metavar="SCOPE,...", help="What it allows: play, sandbox, metrics, admin.")
    ] = "play,sandbox",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="What to call it; its id unless given.")] = None,
    ttl: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When it expires, such as 12h or 30d; never unless given."),
    ] = None,
    state: State = None,
) -> None:
    """Make a token and print it. It is not kept, and cannot be printed again."""
    from envkit.wiring.tokens import open_tokens

    ttl_s = None if ttl is None else _seconds(ttl)
    with open_tokens(state) as tokens:
        print(tokens.create(tenant, filter(None, map(str.strip, scopes.split(","))), name, ttl_s))


@app.command("revoke")
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Id or name, as 'envkit token ls' lists them.")],
    state: State = None,
) -> None:
    """End a token for good; servers notice within a second."""
    from envkit.wiring.tokens import open_tokens

    with open_tokens(state) as tokens:
        tokens.revoke(token)
    print(f"revoked {token}")


@app.command("ls")
def list_tokens(state: State = None) -> None:
    """List the tokens: id, name, tenant, scopes, whether it is valid, when it was made, expires and was last used."""
    from envkit import clock
    from envkit.wiring.tokens import open_tokens

    now = clock.wall()
    with open_tokens(state) as tokens:
        for one in tokens.list():
            validity = "revoked" if one.revoked is not None else "live" if one.is_live(now) else "expired"
            times = (_moment(at) for at in (one.created, one.expires, one.used))
            print(one.id, one.name, one.tenant, ",".join(sorted(one.scopes)), validity, *times, sep="\t")


def _seconds(text: str) -> float:
    parts = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if parts is None:
        raise UsageError(f"--ttl: must be a number of s, m, h or d, such as 30d, got {text!r}")
    return float(int(parts[1]) * _UNITS_S[parts[2]])


def _moment(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%MZ")
