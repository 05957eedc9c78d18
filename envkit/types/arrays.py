"""Read-only NumPy arrays in data types, and the aliases of their element types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float32]
Hashes: TypeAlias = NDArray[np.uint64]

_Array = TypeVar("_Array", bound=NDArray[Any])


def ints(values: Sequence[int] | NDArray[Any]) -> Ints:
    """Return token ids, turn numbers or versions as a read-only int32 array."""
    return _read_only(np.asarray(values, dtype=np.int32))


def bools(values: Sequence[int] | NDArray[Any]) -> Bools:
    """Return a mask as a read-only array."""
    return _read_only(np.asarray(values, dtype=np.bool_))


def floats(values: Sequence[float] | NDArray[Any]) -> Floats:
    """Return log-probabilities or rewards as a read-only float32 array."""
    return _read_only(np.asarray(values, dtype=np.float32))


def hashes(values: Sequence[int] | NDArray[Any]) -> Hashes:
    """Return hashes as a read-only uint64 array."""
    return _read_only(np.asarray(values, dtype=np.uint64))


def _read_only(array: _Array) -> _Array:
    """Return a view that cannot be written to; the caller's array stays as it is."""
    view = array.view()
    view.flags.writeable = False
    return view
