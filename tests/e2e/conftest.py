"""What the tests of the whole path leave behind: nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.fleet.fleet import games_image


@pytest.fixture(scope="session", autouse=True)
def no_image_is_left() -> Iterator[None]:
    yield
    if games_image.cache_info().currsize:
        subprocess.run(["docker", "image", "rm", "--force", games_image()], capture_output=True, check=False)
