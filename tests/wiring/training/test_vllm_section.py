"""Problems of the section of the engine vllm that need neither vllm nor a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from envkit.config.parts import VllmEngineSection
from envkit.wiring.training.kinds.vllm import problems


def section(**keys: Any) -> VllmEngineSection:
    return VllmEngineSection(model="org/name", **keys)


def test_a_server_on_another_machine_needs_a_folder_that_it_can_read() -> None:
    url = "http://10.0.0.7:8100"
    (problem,) = problems(section(url=["http://127.0.0.1:8100", url]))
    assert problem == (
        f"engine.weights_folder: the server {url} may be on another machine, which cannot read weights in /dev/shm; "
        "set it to a folder of a file system that both share, or name the server 127.0.0.1"
    )
    assert problems(section(url=url, weights_folder="/shared")) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_on_this_machine_needs_no_folder(host: str) -> None:
    assert problems(section(url=f"http://{host}:8100")) == []
