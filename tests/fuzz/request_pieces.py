"""A raw request in pieces, and odd pieces to put between them."""

from __future__ import annotations

import random

BODY = b'{"model": "toy", "prompt": "0", "max_tokens": 1}'
PIECES = [
    b"POST /v1/completions HTTP/1.1", b"\r\n", b"host: a", b"\r\n", b"content-type: application/json", b"\r\n",
    b"content-length: %d" % len(BODY), b"\r\n", b"\r\n", BODY,
]  # fmt: skip
STRANGE = [
    b"", b"\x00", b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"\xff", b"\xc3\x28", b"HTTP/1.1", b"HTTP/1.0", b"GET",
    b"OPTIONS", b"*", b"/%00", b"/../../etc/passwd", b"http://a@b:99999/", b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip\r\n", b"content-length: 0\r\n", b"content-length: +5\r\n", b"content-length: 1e3\r\n",
    b"content-length: 99999999999999999999\r\n", b"expect: 100-continue\r\n", b"connection: close\r\n",
    b"upgrade: h2c\r\nconnection: upgrade\r\n", b"a: b\r\n c: folded\r\n", b"authorization: Bearer \xff\r\n",
    b"0\r\n\r\n", b"5\r\nabcde\r\n", b"fffffffffffffffff\r\n", b"a" * 9000, b'{"prompt": "\\ud800"}',
]  # fmt: skip


def mutated(chance: random.Random) -> bytes:
    """A request whose line, headers and body are cut, repeated, swapped and filled with odd pieces."""
    pieces = list(PIECES)
    for _ in range(chance.choice([0, 1, 1, 1, 2, 4])):
        at = chance.randrange(len(pieces))
        match chance.randrange(6):
            case 0:
                pieces[at] = chance.choice(STRANGE)
            case 1:
                pieces.insert(at, chance.choice(STRANGE))
            case 2:
                pieces.insert(at, chance.choice(pieces))
            case 3:
                del pieces[at]
                pieces = pieces or [b""]
            case 4:
                pieces[at] = bytes(byte ^ (chance.randrange(256) * (chance.random() < 0.1)) for byte in pieces[at])
            case 5:
                pieces[at] = pieces[at][: chance.randrange(len(pieces[at]) + 1)]
    return b"".join(pieces)
