"""Small models, made once for a module, and one thread for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small matrices are slower on many threads, and the machine is shared."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of `envkit.trainer_bridge.models.tiny_policy`, with sharp distributions."""
    from tests.trainer_bridge.models import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "policy", seed=1)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with a template for chats."""
    from tests.trainer_bridge.models import write_chat

    return write_chat(tmp_path_factory.mktemp("chat") / "policy", seed=2)
