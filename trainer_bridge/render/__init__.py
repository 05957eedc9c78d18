"""Renderers: convert observations to tokens, and tokens to actions, turn by turn.

Prompts contain sampled tokens as they are; they are never decoded and re-encoded.
"""

from .chat import ChatRenderer
from .plain import ANSWER_CLOSE, ANSWER_OPEN, PlainRenderer

__all__ = ["ANSWER_CLOSE", "ANSWER_OPEN", "ChatRenderer", "PlainRenderer"]
