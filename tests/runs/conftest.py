"""The model whose chats the episodes have."""

from tests.trainer_bridge.conftest import chat_folder

__all__ = ["chat_folder"]
