"""Files of the formats as text that git can show, for tests/golden."""

from __future__ import annotations


def to_text(data: bytes) -> str:
    """Length in decimal, then lines `offset: 32 bytes` in hex; it omits lines of zeros."""
    rows = [(at, data[at : at + 32]) for at in range(0, len(data), 32)]
    return "\n".join([f"length: {len(data)}", *(f"{at:08x}: {row.hex()}" for at, row in rows if any(row))]) + "\n"


def from_text(text: str) -> bytes:
    """The inverse of `to_text`."""
    first, *lines = text.splitlines()
    data = bytearray(int(first.partition(": ")[2]))
    for line in lines:
        at, _, row = line.partition(": ")
        data[int(at, 16) : int(at, 16) + len(row) // 2] = bytes.fromhex(row)
    return bytes(data)
