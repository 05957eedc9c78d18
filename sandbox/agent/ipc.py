"""Removes System V shared memory, message queues and semaphores, which outlive the processes that create them."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .linux import User

_LEAST_BYTES = 16 << 20
"""All objects of one kind are removed if their total size exceeds this size."""
_MESSAGE_BYTES = 64
_SEMAPHORE_BYTES = 64
_OBJECT_BYTES = 1 << 10
"""Approximate kernel overhead of one object."""
_IPC_RMID = 0


def remove_large(user: User) -> None:
    """Remove the System V objects of `user` of each kind whose total size exceeds 16 MiB.

    Programs that are attached to removed shared memory can use it until they end. Does nothing without ctypes. Does
    nothing if this process is not process 1, because it then sees the host's objects, which belong to other programs.
    """
    if os.getpid() != 1:
        return
    for path, size, call in (
        ("/proc/sysvipc/shm", _shared_memory, "shmctl"),
        ("/proc/sysvipc/msg", _messages, "msgctl"),
        ("/proc/sysvipc/sem", _semaphores, "semctl"),
    ):
        objects = [one for one in _objects(path) if user.uid in (None, one["cuid"])]
        if sum(size(one) + _OBJECT_BYTES for one in objects) > _LEAST_BYTES:
            _remove_as(user, call, [one["id"] for one in objects])


def _objects(path: str) -> list[dict[str, int]]:
    """Read a table in /proc; return each row as a dict whose keys are the column names in the first line."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # The table is missing, because this kernel does not support System V objects.
        return []
    with open(fd) as file:
        names = file.readline().split()
        # The second column contains the object's id. Its name is different in each of the three tables.
        if len(names) > 1:
            names[1] = "id"
        return [dict(zip(names, [int(value) for value in line.split()])) for line in file]


def _shared_memory(row: dict[str, int]) -> int:
    return row.get("rss", row["size"]) + row.get("swap", 0)


def _messages(row: dict[str, int]) -> int:
    return row["cbytes"] + row["qnum"] * _MESSAGE_BYTES


def _semaphores(row: dict[str, int]) -> int:
    return row["nsems"] * _SEMAPHORE_BYTES


def _remove_as(user: User, name: str, ids: list[int]) -> None:
    user.act(lambda: _remove(name, ids))


def _remove(name: str, ids: list[int]) -> None:
    try:
        from ctypes import CDLL

        call: Callable[..., int] = getattr(CDLL(None), name)
    except (ImportError, OSError, AttributeError):
        return
    for one in ids:
        if name == "semctl":
            call(one, 0, _IPC_RMID)
        else:
            call(one, _IPC_RMID, None)
