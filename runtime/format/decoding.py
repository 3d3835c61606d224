"""Decoding the JSON files of an engine, with errors that say which file, and which field."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..errors import EngineFieldError, EngineFormatError

COPY_AGAIN = "copy the engine again from where it was made, or compile the model again"
_NEWER = "a field that this one does not know is of a later version"
T = TypeVar("T")
_MOST = 500  # characters of what is wrong, in which names of fields may stand


def decode(raw: bytes, name: str, kind: type[T]) -> T:
    """The content of file `name`. EngineFieldError where a field is not as it must be, EngineFormatError where it is no
    JSON."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        hint = f"compile the model again, or install the icc that wrote the engine; {_NEWER}"
        raise EngineFieldError(f"{name}: {str(error)[:_MOST]}", hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(f"{name}: {error}", COPY_AGAIN) from error
