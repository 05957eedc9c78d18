"""``envkit node``: the nodes of a server that are other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.fleet.sandbox import Ca, ServerUrl, TokenFile, ask_server
from envkit.cli.tables import AsJson, echo, note, print_json, print_table
from envkit.errors import UnreachableError

if TYPE_CHECKING:
    from envkit.http.client.sandbox_client import SandboxClient
    from envkit.http.protocol.node_messages import NodeStatus

_POLL_S = 1.0

app = typer.Typer(no_args_is_help=True, help="List and drain the nodes of a server.", rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the node; see envkit node list.")]


@app.command("list")
def list_nodes(url: ServerUrl, token_file: TokenFile = None, ca: Ca = None, as_json: AsJson = False) -> None:
    """List the nodes of a server that are other machines. The token needs the scope admin."""
    import msgspec

    found = ask_server(lambda client: client.list_nodes(), url, token_file, ca)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    rows = [
        [
            one.node,
            one.state,
            str(one.sandboxes),
            *(("", "", "") if one.facts is None else (one.facts.backend, one.facts.architecture, one.facts.version)),
            one.why or one.url,
        ]
        for one in found
    ]
    print_table(("NAME", "STATE", "SANDBOXES", "BACKEND", "MACHINE", "ENVKIT", "ADDRESS OR PROBLEM"), rows)


@app.command("drain")
def drain(name: Name, url: ServerUrl, token_file: TokenFile = None, ca: Ca = None) -> None:
    """Start no more sandboxes on a node, and wait until those that it has have ended.

    Sandboxes of environments move to other nodes. Those of clients and of tools end when their users end them. Then
    the node can be stopped, and joins again when it is started. If the command is interrupted, the node keeps draining.
    """

    async def wait(client: SandboxClient) -> None:
        import anyio

        left: NodeStatus | None = await client.drain(name)
        printed = -1
        while left is not None and left.sandboxes and left.state == "draining":
            if left.sandboxes != printed:
                note(f"{left.sandboxes} {'sandbox' if left.sandboxes == 1 else 'sandboxes'} left on {name}")
            printed = left.sandboxes
            await anyio.sleep(_POLL_S)
            left = next((one for one in await client.list_nodes() if one.node == name), None)
        if left is None or left.state != "draining":
            state = "gone from the list" if left is None else left.state + (f" ({left.why})" if left.why else "")
            raise UnreachableError(f"{name} is not draining any more: it is {state}")

    ask_server(wait, url, token_file, ca)
    echo(f"{name} has no sandboxes; it can be stopped")


@app.command("admit")
def admit(name: Name, url: ServerUrl, token_file: TokenFile = None, ca: Ca = None) -> None:
    """Use a node again that is being drained."""
    ask_server(lambda client: client.drain(name, drains=False), url, token_file, ca)
    echo(f"{name} is used again")
