"""Changes of inputs: of their bytes, and of the structures that the bytes encode. Each takes the input, a source of
randomness and the seeds, and returns the changed input; an input of another format is returned as it is."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

Change = Callable[[bytes, random.Random, Sequence[bytes]], bytes]

EDGES = (
    0, 1, -1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53,
    2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**30,
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, *EDGES, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), "", " ", "a", "\0", "\n",
    "0", "../x",
    "/etc/passwd", "\ud800", "\u202e", "a" * 5000, "é" * 300, [], {}, [[]], [None], {"": None}, {"a": {"a": {}}},
)  # fmt: skip
MOST = 1 << 20  # largest input, bytes


def bits(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Change one to four bytes."""
    changed = bytearray(data or b"\0")
    for _n in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(changed))
        changed[at] = chance.choice((changed[at] ^ 1 << chance.randrange(8), 0, 255, chance.randrange(256)))
    return bytes(changed)


def cut(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Cut off the end, or remove bytes in the middle."""
    begin = chance.randrange(len(data) + 1)
    return data[:begin] + (data[begin + chance.randrange(1, 40) :] if chance.random() < 0.6 else b"")


def repeated(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Repeat some bytes many times."""
    at = chance.randrange(len(data) + 1)
    piece = data[at : at + chance.choice((1, 2, 8, 40))]
    return data[:at] + piece * chance.choice((2, 3, 20, 300, 2000)) + data[at:]


def spliced(data: bytes, chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Join the beginning of the input and the end of a seed."""
    other = chance.choice(seeds)
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


def inserted(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Insert 1 to 11 random bytes."""
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.randrange(1, 12)) + data[at:]


def number(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Replace a decimal digit by another number."""
    digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if not digits:
        return data
    at = chance.choice(digits)
    return data[:at] + str(chance.choice(EDGES)).encode() + data[at + 1 :]


def field(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Replace a little-endian number of 1, 2, 4 or 8 bytes."""
    form, size = chance.choice((("B", 1), ("H", 2), ("I", 4), ("Q", 8)))
    if len(data) < size:
        return data
    at = chance.randrange(len(data) - size + 1)
    now = struct.unpack_from(f"<{form}", data, at)[0]
    value = chance.choice((*EDGES, now + 1, now - 1, now * 2, now ^ 1)) % (1 << 8 * size)
    return data[:at] + struct.pack(f"<{form}", value) + data[at + size :]


BYTES: tuple[Change, ...] = (bits, cut, repeated, spliced, inserted, number, field)


# -- text ------------------------------------------------------------------------------------------------------------


def words(dictionary: Sequence[str]) -> Change:
    """Insert words of a language, or replace other text by them."""

    def change(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
        for _n in range(chance.choice((1, 1, 2, 5))):
            at = chance.randrange(len(data) + 1)
            word = chance.choice(dictionary).encode() * chance.choice((1, 1, 1, 1, 2, 200))
            data = data[:at] + word + data[at + chance.choice((0, 0, 1, 5)) :]
        return data

    return change


def lines(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Remove, repeat or replace a line, or shuffle all lines."""
    parts = data.split(b"\n")
    at = chance.randrange(len(parts))
    match chance.randrange(4):
        case 0:
            del parts[at]
        case 1:
            parts.insert(at, chance.choice(parts))
        case 2:
            parts[at] = chance.choice(parts)
        case _:
            chance.shuffle(parts)
    return b"\n".join(parts)


# -- JSON ------------------------------------------------------------------------------------------------------------


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        here = left.pop()
        if isinstance(here, dict | list):
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            found += [(here, key) for key in keys]
            left += [here[key] for key in keys]
    return found


def changed_value(value: Any, chance: random.Random) -> Any:
    """Change a JSON value, its containers in place, and return it: one to three entries become odd, are removed,
    repeated, renamed, replaced by other entries, or nested deeply."""
    root = [value]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = _places(root)
        inside, key = chance.choice(places)
        match chance.randrange(7):
            case 0 | 1:
                inside[key] = copy.deepcopy(chance.choice(ODD))
            case 2 if inside is not root:
                del inside[key]
            case 3:
                inside[key] = (
                    [inside[key], copy.deepcopy(inside[key])] if isinstance(inside, dict) else {"a": inside[key]}
                )
            case 4 if isinstance(inside, dict):
                inside[chance.choice(("", "a", key + "x", key.upper()))] = inside.pop(key)
            case 5:
                other, place = chance.choice(places)
                if place in other if isinstance(other, dict) else place < len(other):
                    inside[key] = copy.deepcopy(other[place])
            case _:
                for _n in range(chance.choice((2, 30, 120))):
                    inside[key] = [inside[key]] if chance.random() < 0.5 else {"a": inside[key]}
        if not _places(root):
            break
    return root[0]


def json_value(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Change the value of a JSON text."""
    try:
        value = changed_value(json.loads(data), chance)
        return json.dumps(value, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return data


def json_text(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """A JSON text that has a name twice, or a value that JSON does not allow."""
    what = (
        b'"a":1,"a":2,',
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"00",
        b"1.",
        b"'a'",
        b"/**/",
        b"\\u",
        b"[" * 2000,
        b"1" * 5000,
    )
    marks = [i for i, byte in enumerate(data) if byte in b"{:,["]
    at = chance.choice(marks) + 1 if marks else 0
    return data[:at] + chance.choice(what) + data[at:]


JSON: tuple[Change, ...] = (json_value, json_value, json_value, json_text, *BYTES)


# -- files -----------------------------------------------------------------------------------------------------------


def safetensors_header(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Change the header of a safetensors file, and state the length of the new one."""
    if len(data) < 8:
        return data
    size = int.from_bytes(data[:8], "little")
    header = json_value(data[8 : 8 + size], chance, ())
    header = header.ljust(-(-len(header) // 8) * 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def near(*marks: bytes, reach: int = 48) -> Change:
    """Change a number within `reach` bytes from the start of one of the marks."""

    def change(data: bytes, chance: random.Random, seeds: Sequence[bytes]) -> bytes:
        mark = chance.choice(marks)
        found = [i for i in range(len(data)) if data.startswith(mark, i)] if data.count(mark) else []
        if not found:
            return bits(data, chance, seeds)
        begin = chance.choice(found)
        piece = data[begin : begin + reach]
        return data[:begin] + field(piece, chance, seeds) + data[begin + reach :]

    return change
