"""Logs of the server: one line per event, as text or as JSON, with its time, fields and request."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

FORMATS = {"text": "for people: time, level, message, field=value", "json": "one object per line"}
LEVELS = {
    "debug": "also requests for the state and the metrics",
    "info": "also every other request, and when the engine is ready",
    "warning": "what may need attention",
    "error": "what failed",
}
# control characters, which could end a line or colour a terminal, are written as escapes
_CONTROLS = {code: f"\\x{code:02x}" for code in [*range(32), 127, *range(128, 160), 0x2028, 0x2029]}


@dataclass(frozen=True)
class LogOptions:
    """format: one of FORMATS; level: one of LEVELS, the lowest that is logged."""

    format: str = "text"
    level: str = "info"

    def to_text(self) -> str:
        """The options as one argument of a command line."""
        return f"{self.format}:{self.level}"

    @classmethod
    def from_text(cls, text: str) -> LogOptions:
        """The options of a text that `to_text` gave."""
        return cls(*text.split(":"))


@dataclass
class RequestContext:
    """The current HTTP request: its id, the caller's trace (W3C `traceparent`), and the fields of its line in the
    log."""

    id: str
    traceparent: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)


def note(**fields: Any) -> None:
    """Add fields to the current request's line in the log."""
    if (request := current_request.get()) is not None:
        request.fields |= fields


def with_fields(**fields: Any) -> dict[str, Any]:
    """The `extra` of a logging call, for a line with these fields."""
    return {"fields": fields}


class LineFormatter(logging.Formatter):
    """Formats a record as one line; in text format a traceback follows."""

    def __init__(self, options: LogOptions) -> None:
        super().__init__()
        self._json = options.format == "json"

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        shown = time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields: dict[str, Any] = getattr(record, "fields", {})
        if (request := current_request.get()) is not None:
            fields = {**fields, "request_id": request.id}
        error = self.formatException(record.exc_info) if record.exc_info else ""
        if self._json:
            line = {"time": shown, "level": record.levelname.lower(), "message": record.getMessage(), **fields}
            return json.dumps(line | ({"exception": error} if error else {}), default=str)
        parts = [shown, f"{record.levelname:7}", record.getMessage(), *[f"{k}={_word(v)}" for k, v in fields.items()]]
        lines = [" ".join(parts), *error.splitlines()]
        return "\n".join([line.translate(_CONTROLS) for line in lines])


def _word(value: Any) -> str:
    """A value as one word: quoted if it has spaces, quotes or "="."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(char in text for char in ' "=') else text


def configure(options: LogOptions) -> None:
    """Log to standard error; other libraries log only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(options))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("icc").setLevel(options.level.upper())
