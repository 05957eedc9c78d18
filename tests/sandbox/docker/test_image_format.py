"""Which images a sandbox can start from: those of our format, and those that envkit did not build."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import pytest

from envkit import clock
from envkit.errors import SandboxRefusedError
from envkit.sandbox.docker.api import Daemon
from envkit.sandbox.docker.container_config import Image
from envkit.sandbox.docker.images import (
    GAMES_IMAGE,
    OFFLINE_BASE,
    ONLINE_BASE,
    PLAIN_IMAGE,
    find_image,
    why_other_format,
)
from envkit.types import SandboxSpec

MESSAGE = (
    "image {} has another format (found 2; this version of envkit needs 1); run envkit image build NAME --tag {}".format
)


def an_image(number: str | None) -> Image:
    return Image("sha256:1", {}, (), number)


@pytest.mark.parametrize(("number", "name"), [("1", GAMES_IMAGE), ("1", "my/tools:1"), (None, "python:3.11-slim")])
def test_an_image_of_our_format_and_one_that_envkit_did_not_build_can_be_used(number: str | None, name: str) -> None:
    assert why_other_format(an_image(number), name) is None


def test_an_image_of_another_format_is_refused_with_both_numbers_and_the_remedy() -> None:
    assert why_other_format(an_image("2"), "my/tools:1") == MESSAGE("my/tools:1", "my/tools:1")


@dataclass
class Images:
    """A daemon that has some images."""

    here: Collection[str]

    async def image(self, name: str) -> Image | None:
        return replace(an_image("1"), id=name) if name in self.here else None

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
    found = clock.run(partial(find_image, cast("Daemon", Images(here)), "sb", SandboxSpec(), pull=False))
    assert found.id == name


def test_without_a_default_image_the_error_names_the_command_that_builds_it() -> None:
    with pytest.raises(SandboxRefusedError, match=r"no image envkit/python:1 here; build it: .*image build python"):
        clock.run(partial(find_image, cast("Daemon", Images([GAMES_IMAGE])), "sb", SandboxSpec(), pull=False))


def test_the_image_games_without_a_number_is_older() -> None:
    reported = why_other_format(an_image(None), GAMES_IMAGE)

    assert reported is not None
    assert reported.startswith(
        f"image {GAMES_IMAGE} has another format (found 0, since it has no label envkit.format; "
    )
    assert reported.endswith("envkit image build games")
