"""An interpreter of the filters of system calls that the tests judge."""

from __future__ import annotations

import struct

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's number of each architecture."""


def verdict(program: bytes, number: int, *arguments: int, audit: int) -> int:
    """Run a filter of system calls as the kernel would."""
    full = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, audit, 0, *full)
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator = position = 0
    memory: dict[int, int] = {}
    while True:
        code, if_true, if_false, operand = instructions[position]
        position += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x05:
            position += operand
        elif code == 0x02:
            memory[operand] = accumulator
        elif code == 0x60:
            accumulator = memory[operand]
        else:
            holds = {
                0x15: accumulator == operand,
                0x25: accumulator > operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[code]
            position += if_true if holds else if_false
