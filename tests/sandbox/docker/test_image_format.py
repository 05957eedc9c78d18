"""Which images a sandbox can start from: those of our format, and those that envkit did not build."""

from __future__ import annotations

import pytest

from envkit.sandbox.docker.container_config import Image
from envkit.sandbox.docker.images import DEFAULT_IMAGE, why_other_format

MESSAGE = (
    "image {} has another format (found 2; this version of envkit needs 1); run envkit image build NAME --tag {}".format
)


def an_image(number: str | None) -> Image:
    return Image("sha256:1", {}, (), number)


@pytest.mark.parametrize(("number", "name"), [("1", DEFAULT_IMAGE), ("1", "my/tools:1"), (None, "python:3.11-slim")])
def test_an_image_of_our_format_and_one_that_envkit_did_not_build_can_be_used(number: str | None, name: str) -> None:
    assert why_other_format(an_image(number), name) is None


def test_an_image_of_another_format_is_refused_with_both_numbers_and_the_remedy() -> None:
    assert why_other_format(an_image("2"), "my/tools:1") == MESSAGE("my/tools:1", "my/tools:1")


def test_the_default_image_without_a_number_is_older() -> None:
    reported = why_other_format(an_image(None), DEFAULT_IMAGE)

    assert reported is not None
    assert reported.startswith(
        f"image {DEFAULT_IMAGE} has another format (found 0, since it has no label envkit.format; "
    )
    assert reported.endswith("envkit image build games")
