"""Decodes the JSON files of an engine, with errors that name the file and the field."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..errors import EngineFieldError, EngineFormatError

COPY_AGAIN = "copy the engine again from where it was made, or compile the model again"
_NEWER = "a field that this one does not know is of a later version"
T = TypeVar("T")
_MOST = 500  # characters of an error text, which may quote names of fields


def decode(raw: bytes, name: str, kind: type[T]) -> T:
    """Decode the content of file `name`. EngineFieldError if a field is wrong, EngineFormatError if it is not JSON."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        hint = f"compile the model again, or install the icc that wrote the engine; {_NEWER}"
        raise EngineFieldError(f"{name}: {str(error)[:_MOST]}", hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(f"{name}: {error}", COPY_AGAIN) from error
