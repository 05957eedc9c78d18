"""Data types as lists, which ``==`` compares by value; it cannot compare the arrays of the data types themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return data classes as dictionaries with their type, and arrays and tuples as lists, at any depth."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        return {"type": type(value).__name__, **{one.name: plain(getattr(value, one.name)) for one in fields(value)}}
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value
