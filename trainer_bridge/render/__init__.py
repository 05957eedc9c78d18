"""Text to tokens and back, one turn at a time. What a policy sampled is never decoded and encoded again."""

from .chat import ChatRenderer
from .plain import ANSWER_CLOSE, ANSWER_OPEN, PlainRenderer

__all__ = ["ANSWER_CLOSE", "ANSWER_OPEN", "ChatRenderer", "PlainRenderer"]
