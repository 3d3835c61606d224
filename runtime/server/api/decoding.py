"""Decodes a body to the type of its schema, or refuses it with the reason."""

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
_MOST_SAID = 500  # characters of a client's field name that are quoted
_KEY = "key` in `"  # how msgspec's path begins if the wrong value is a key of an object
# types of content parts that no text model takes, in msgspec's error for an unknown type
_MEDIA = re.compile(r"Invalid value '((?:input_|document_)?(?:image|audio|video|file|document)(?:_url)?)'")


def decoded(raw: bytes, kind: type[T]) -> T:
    """A body as an object of type `kind`. HttpError 400 tells which field is wrong and why."""
    with _said():
        return decode(raw, kind)


def converted(fields: Any, kind: type[T]) -> T:
    """The fields of a request, converted from another API, as an object of type `kind`; else HttpError 400."""
    with _said():
        return msgspec.convert(fields, kind)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Turn errors of decoding into HttpError 400."""
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
    """Decode a body. At its top level null counts as absent, and 1.0 is an integer everywhere, as in JSON Schema.
    Raises what msgspec raises."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        value = msgspec.json.decode(raw)
        if not isinstance(value, dict) or not isinstance(kind, type(msgspec.Struct)):
            raise
        if (prepare := getattr(kind, "prepare", None)) is not None:  # for rules that msgspec cannot state
            value = prepare(value)
        said = _without_nothing(value, kind)
        try:
            return msgspec.convert(said, kind)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return msgspec.convert(_whole(said), kind)


def _without_nothing(body: dict[str, Any], kind: type) -> dict[str, Any]:
    """The body without null fields that are not required, and without unknown fields that have their default."""
    fields = _required(kind)
    return {
        name: value
        for name, value in body.items()
        if fields.get(name) or not (value is None or (name not in fields and _is_default(name, value)))
    }


@functools.cache  # cached: reading a type's annotations takes a millisecond
def _required(kind: type) -> dict[str, bool]:
    """The fields of a body, and whether each is required."""
    return {field.name: field.required for field in msgspec.structs.fields(kind)}


def _is_default(name: str, value: Any) -> bool:
    return name in OTHERS and value == OTHERS[name] and isinstance(value, bool) == isinstance(OTHERS[name], bool)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(part) for name, part in value.items()}
    return [_whole(part) for part in value] if isinstance(value, list) else value
