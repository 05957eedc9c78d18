"""The image of a sandbox whose spec names none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import cast

import pytest

from envkit import clock
from envkit.errors import SandboxRefusedError
from envkit.sandbox.docker.api import Daemon
from envkit.sandbox.docker.container_config import Image
from envkit.sandbox.docker.images import GAMES_IMAGE, OFFLINE_BASE, ONLINE_BASE, PLAIN_IMAGE, find_image
from envkit.types import SandboxSpec


@dataclass
class Images:
    """A daemon that has some images."""

    here: Collection[str]

    async def image(self, name: str) -> Image | None:
        return Image(name, {}, ()) if name in self.here else None

    async def image_names(self) -> Collection[str]:
        return self.here


@pytest.mark.parametrize(
    ("here", "name"),
    [
        ((GAMES_IMAGE, PLAIN_IMAGE, ONLINE_BASE, OFFLINE_BASE), PLAIN_IMAGE),
        ((GAMES_IMAGE, ONLINE_BASE, OFFLINE_BASE), ONLINE_BASE),
        ((GAMES_IMAGE, OFFLINE_BASE), OFFLINE_BASE),
    ],
)
def test_the_default_image_is_one_without_envkit(here: Collection[str], name: str) -> None:
    found = clock.run(partial(find_image, cast("Daemon", Images(here)), "sb", SandboxSpec()))
    assert found.id == name


def test_without_a_default_image_the_error_names_the_command_that_builds_it() -> None:
    with pytest.raises(SandboxRefusedError, match=r"no image envkit/python:1 here; build it: .*image build python"):
        clock.run(partial(find_image, cast("Daemon", Images([GAMES_IMAGE])), "sb", SandboxSpec()))
