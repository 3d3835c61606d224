"""Extras of requests: their inputs per token besides ids, see `ScheduledSequence.extras`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ..batch.scheduled import Extras
from ..errors import RequestError
from ..format.adapters import ADAPTER
from ..format.batch import BatchArray


def check_extras(extras: Extras, inputs: Sequence[BatchArray], longest: int) -> None:
    """Raise RequestError for extras that the program does not declare as inputs, and for bytes that are not whole rows
    of at most `longest` tokens."""
    known = {array.name: array for array in inputs}
    for name, rows in extras.items():
        if name not in known:
            have = f"it takes {', '.join(known)}" if known else "it takes none"
            raise RequestError(f"the engine has no input {name!r}: {have}", field="extras")
        size = known[name].row_bytes
        if len(rows) % size or len(rows) // size > longest:
            raise RequestError(
                f"input {name!r}: {len(rows)} bytes are not rows of {size} bytes of at most {longest} tokens",
                field="extras",
            )


def isolating_salt(salt: bytes, extras: Extras) -> bytes:
    """A salt that is equal only for requests with equal `salt` and equal extras, because the KV of equal tokens depends
    on these. The slot of an adapter is left out, see `Standing.adapter`."""
    extras = {name: rows for name, rows in extras.items() if name != ADAPTER.name}
    if not extras:
        return salt
    digest = hashlib.blake2b(salt, digest_size=32, person=b"icc-kv-extras")
    for name in sorted(extras):
        for part in (name.encode(), extras[name]):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
