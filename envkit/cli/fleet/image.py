"""``envkit image``: Docker images for sandboxes."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from envkit.cli.tables import echo, note

app = typer.Typer(no_args_is_help=True, help="Build Docker images for sandboxes.", rich_markup_mode=None)


@app.command("build")
def build(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Recipe, such as games: the name of docker/NAME.Dockerfile.")
    ],
    base: Annotated[str | None, typer.Option(metavar="IMAGE", help="Base image, instead of the default one.")] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Use no network: install local packages on the base image of docker/base-from-debootstrap.",
        ),
    ] = False,
    packages: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="PACKAGE", help="Python package to add, such as your own environments; repeatable."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="NAME", help="Data of environments to add, built if missing; repeatable. See envkit data."
        ),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="NAME", help="Tag of the image; by default envkit/NAME:1.")] = None,
) -> None:
    """Build a Docker image for sandboxes and print its name."""
    from envkit import clock
    from envkit.wiring import data as of_envs
    from envkit.wiring.sandboxes import images

    for one in data or ():
        of_envs.build(one, note)
    build_it = partial(
        images.build,
        name,
        base=base,
        offline=offline,
        packages=packages or [],
        tag=tag,
        announce=note,
        data={one: of_envs.folder_of(one) for one in data or ()},
    )
    echo(clock.run(build_it))
