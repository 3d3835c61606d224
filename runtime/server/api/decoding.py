"""A body as what its schema says, or why it is not."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from .errors import HttpError
from .requests import NO_SUCH_SEARCH, OTHERS

T = TypeVar("T")
_MOST_SAID = 500  # characters of a name that a client made up
_KEY = "key` in `"  # how msgspec begins the place of a value that is a key of an object
# types of parts of a content that no text model takes, as msgspec names a value that is none of those it knows
_MEDIA = re.compile(r"Invalid value '((?:input_|document_)?(?:image|audio|video|file|document)(?:_url)?)'")


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
        in_key = place.startswith(_KEY)
        text = f"a key of it: {text}" if in_key else text
        field = place.removeprefix(_KEY).removeprefix("$").removeprefix(".").rstrip("`")
        if (media := _MEDIA.search(text)) and ("content" in field or "instructions" in field):
            kind = media[1].removeprefix("input_").removesuffix("_url")
            message = f"{field}: this model reads text, and takes no {kind}"
            raise HttpError(400, message, field, "unsupported_content") from error
        unknown = re.search(r"unknown field `(.+)`", text)
        named = ".".join(filter(None, [field, unknown[1] if unknown else ""])) or None
        if named in NO_SUCH_SEARCH:
            text = f"{named}: there is no {NO_SUCH_SEARCH[named]}, which has left transformers, too: leave it out"
            raise HttpError(400, text, named, "unsupported_parameter") from error
        text = f"{field[:_MOST_SAID]}: {text}" if field else text
        raise HttpError(400, text[: 2 * _MOST_SAID], named and named[:_MOST_SAID], "invalid_value") from error
    except msgspec.DecodeError as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="invalid_json") from error


def decode(raw: bytes, kind: type[T]) -> T:
    """A body. At its top level null is as good as nothing, and 1.0 is an integer everywhere, as JSON Schema has it.
    Raises what msgspec raises."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        value = msgspec.json.decode(raw)
        if not isinstance(value, dict) or not isinstance(kind, type(msgspec.Struct)):
            raise
        if (prepare := getattr(kind, "prepare", None)) is not None:  # of what JSON Schema can say and msgspec cannot
            value = prepare(value)
        said = _without_nothing(value, kind)
        try:
            return msgspec.convert(said, kind)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return msgspec.convert(_whole(said), kind)


def _without_nothing(body: dict[str, Any], kind: type) -> dict[str, Any]:
    """The fields that say something, and those that must be there."""
    fields = _required(kind)
    return {
        name: value
        for name, value in body.items()
        if fields.get(name) or not (value is None or (name not in fields and _is_default(name, value)))
    }


@functools.cache  # reading a type's annotations takes a millisecond
def _required(kind: type) -> dict[str, bool]:
    """The fields of a body, and whether each must be there."""
    return {field.name: field.required for field in msgspec.structs.fields(kind)}


def _is_default(name: str, value: Any) -> bool:
    return name in OTHERS and value == OTHERS[name] and isinstance(value, bool) == isinstance(OTHERS[name], bool)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(part) for name, part in value.items()}
    return [_whole(part) for part in value] if isinstance(value, list) else value
