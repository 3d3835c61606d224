"""A body as what its schema says, or why it is not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from .errors import HttpError
from .requests import decode

T = TypeVar("T")


def decoded(raw: bytes, kind: type[T]) -> T:
    """A body as what its schema says, or HttpError 400: which field and why."""
    with _said():
        return decode(raw, kind)


def converted(fields: Any, kind: type[T]) -> T:
    """The request that another API's request is, or HttpError 400."""
    with _said():
        return msgspec.convert(fields, kind)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """What is wrong with a body, as HttpError 400."""
    try:
        yield
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deep", code="invalid_json") from error
    except UnicodeDecodeError as error:
        raise HttpError(400, "the body is not UTF-8", code="invalid_json") from error
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `")
        field = place.removeprefix("$.").rstrip("`")
        unknown = re.search(r"unknown field `(.+)`", text)
        named = ".".join(filter(None, [field, unknown[1] if unknown else ""])) or None
        raise HttpError(400, f"{field}: {text}" if field else text, named, "invalid_value") from error
    except msgspec.DecodeError as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="invalid_json") from error
