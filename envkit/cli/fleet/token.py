"""``envkit token``: access tokens of a server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from envkit.cli.tables import AsJson, echo, moment, print_json, print_table
from envkit.errors import UsageError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke server tokens.", rich_markup_mode=None)

State = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="State folder of the server.  [default: ~/.local/state/envkit or $XDG_STATE_HOME/envkit]"
    ),
]


@app.command("create")
def create(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant that owns what the token's users create.")],
    scopes: Annotated[
        str, typer.Option(metavar="SCOPE,...", help="What the token allows: play, sandbox, metrics, node, admin.")
    ] = "play,sandbox",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the token; by default its id.")] = None,
    ttl: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Lifetime, such as 12h or 30d; by default unlimited."),
    ] = None,
    state: State = None,
) -> None:
    """Create a token and print it. Only a hash is saved, so the token cannot be printed again."""
    from envkit.wiring.gateway.token_store import open_tokens

    ttl_s = None
    if ttl is not None:
        if (parts := re.fullmatch(r"(\d{1,9})([smhd])", ttl)) is None:
            raise UsageError(f"--ttl: must be a whole number and s, m, h or d, such as 30d; got {ttl!r}")
        ttl_s = float(int(parts[1]) * _UNITS_S[parts[2]])
    echo(open_tokens(state).create(tenant, filter(None, map(str.strip, scopes.split(","))), name, ttl_s))


@app.command("revoke")
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Id or name of the token; see envkit token ls.")],
    state: State = None,
) -> None:
    """Revoke a token permanently. Running servers reject it within a second."""
    from envkit.wiring.gateway.token_store import open_tokens

    open_tokens(state).revoke(token)
    echo(f"revoked {token}")


@app.command("ls")
def list_tokens(state: State = None, as_json: AsJson = False) -> None:
    """List the tokens of a server. Times are in UTC; with --json they are seconds since 1970."""
    from envkit import clock
    from envkit.wiring.gateway.token_store import open_tokens

    now = clock.wall()
    listed = [
        {
            "id": one.id,
            "name": one.name,
            "tenant": one.tenant,
            "scopes": ",".join(sorted(one.scopes)),
            "state": "revoked" if one.revoked is not None else "valid" if one.is_live(now) else "expired",
            "created_s": one.created,
            "expires_s": one.expires,
            "used_s": one.used,
        }
        for one in open_tokens(state).list()
    ]
    if as_json:
        print_json(listed)
        return
    print_table(
        ("ID", "NAME", "TENANT", "SCOPES", "STATE", "CREATED", "EXPIRES", "LAST USED"),
        [[value if isinstance(value, str) else moment(value) for value in one.values()] for one in listed],
    )
