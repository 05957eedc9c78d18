"""Renderers: convert observations to tokens, and tokens to actions, turn by turn.

A prompt that continues the previous turn contains the sampled tokens unchanged, not decoded and encoded again.
"""

from .chat import ChatRenderer, ToolSupport
from .plain import ANSWER_CLOSE, ANSWER_OPEN, PlainRenderer

__all__ = ["ANSWER_CLOSE", "ANSWER_OPEN", "ChatRenderer", "PlainRenderer", "ToolSupport"]
