"""``envkit image``: images for boxes of Docker."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Build images for boxes of Docker.", rich_markup_mode=None)


@app.command("build")
def build(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to build, such as games; see 'envkit image ls'.")],
    base: Annotated[str | None, typer.Option(metavar="IMAGE", help="Image to build upon.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Take only what is on this machine (docker/base-from-debootstrap).")
    ] = False,
    packages: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE", help="Package to install, such as your own worlds."),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the new image.")] = None,
) -> None:
    """Build an image, and print its name."""
    from envkit import clock
    from envkit.wiring.sandboxes import images

    print(
        clock.run(partial(images.build, name, base=base, offline=offline, packages=packages or [], tag=tag, say=_say))
    )


@app.command("ls")
def list_images() -> None:
    """List what can be built."""
    from envkit.wiring.sandboxes.images import names

    for name in names():
        print(name)


def _say(line: str) -> None:
    typer.echo(line, err=True)
