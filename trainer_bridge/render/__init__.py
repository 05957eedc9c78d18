"""Conversion of text to tokens and back, one turn at a time. Sampled tokens are never decoded and re-encoded."""

from .chat import ChatRenderer
from .plain import ANSWER_CLOSE, ANSWER_OPEN, PlainRenderer

__all__ = ["ANSWER_CLOSE", "ANSWER_OPEN", "ChatRenderer", "PlainRenderer"]
