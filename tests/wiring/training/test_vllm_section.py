"""Problems of the section of the engine vllm that need neither vllm nor a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from envkit.config.parts import VllmEngineSection
from envkit.wiring.training.kinds.vllm import problems


def section(**keys: Any) -> VllmEngineSection:
    return VllmEngineSection(model="org/name", **keys)


@pytest.mark.parametrize("host", ["10.0.0.7", "127.0.0.1", "[::1]"])
def test_a_server_anywhere_needs_no_shared_folder(host: str) -> None:
    assert problems(section(url=f"http://{host}:8100")) == []


@pytest.mark.parametrize("url", ["http://10.0.0.5", "https://10.0.0.5:8300", "http://10.0.0.5:83000", "10.0.0.5:8300"])
def test_the_url_of_weights_has_a_host_and_a_port(url: str) -> None:
    assert problems(section(url="http://10.0.0.7:8100", weights_url=url)) == [
        f"engine.weights_url: must be like http://10.0.0.5:8300, got {url!r}"
    ]


def test_weights_are_in_a_shared_folder_or_at_a_url() -> None:
    both = {"weights_url": "http://10.0.0.5:8300", "weights_folder": "/shared"}
    assert problems(section(url="http://10.0.0.7:8100", **both)) == [
        "engine.weights_url: has no effect beside engine.weights_folder; leave one of them out"
    ]
