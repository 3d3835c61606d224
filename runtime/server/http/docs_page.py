"""The page at `/docs`: every operation of the API with its fields, made from the OpenAPI document. No script."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

_STYLE = Path(__file__).with_name("page") / "docs.css"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="stylesheet" href="docs.css"></head>
<body><header><h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p></header>
<nav>{links}</nav><main>{operations}</main></body></html>
"""
_DEPTH = 4  # levels of fields that are shown; deeper types are only named


def add_docs(app: FastAPI, document: dict[str, Any]) -> None:
    """Add /docs, a page made of the OpenAPI document."""
    page, style = docs_page(document).encode(), _STYLE.read_bytes()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page, media_type="text/html; charset=utf-8")

    @app.get("/docs.css", include_in_schema=False)
    async def docs_style() -> Response:
        return Response(style, media_type="text/css; charset=utf-8", headers={"cache-control": "no-cache"})


def docs_page(document: dict[str, Any]) -> str:
    """The document as HTML."""
    links, operations = [], []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"{method.upper()} {path}"
            anchor = escape(f"{method}{path}".replace("/", "-"))
            links.append(f'<a href="#{anchor}">{escape(name)}</a>')
            body = _operation(document, operation)
            operations.append(f'<section id="{anchor}"><h2>{escape(name)}</h2>{body}</section>')
    return _PAGE.format(
        title=f"API of icc {escape(document['info']['version'])}",
        links="".join(links),
        operations="".join(operations),
    )


def _operation(document: dict[str, Any], operation: dict[str, Any]) -> str:
    parts = [f"<p>{escape(operation.get('description', ''))}</p>"]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        parts.append(f"<h3>Request</h3>{_fields(document, content['schema'], _DEPTH)}")
    for status, response in operation["responses"].items():
        body = response.get("content", {}).get("application/json")
        if status == "200" and body is not None:
            parts.append(f"<h3>Answer</h3>{_fields(document, body['schema'], _DEPTH)}")
    errors = {status: response for status, response in operation["responses"].items() if status != "200"}
    rows = [f"<dt>{status}</dt><dd>{escape(response['description'])}</dd>" for status, response in errors.items()]
    parts.append(f"<details><summary>Errors</summary><dl>{''.join(rows)}</dl></details>")
    return "".join(parts)


def _fields(document: dict[str, Any], schema: dict[str, Any], depth: int) -> str:
    """The description of a schema as HTML, with the fields of its objects."""
    schema = _resolved(document, schema)
    about = f"<p>{escape(schema['description'])}</p>" if schema.get("description") else ""
    rows = []
    for name, part in schema.get("properties", {}).items():
        required = " class=required" if name in schema.get("required", ()) else ""
        inner = "".join(_fields(document, found, depth - 1) for found in _objects(document, part)) if depth > 1 else ""
        inner = f"<details><summary>fields</summary>{inner}</details>" if inner else ""
        rows.append(f"<dt{required}>{escape(name)}</dt><dd>{escape(_kind(document, part))}{inner}</dd>")
    return about + (f"<dl>{''.join(rows)}</dl>" if rows else "")


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def _objects(document: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects with named fields that a value of this schema may be or hold."""
    schema = _resolved(document, schema)
    if schema.get("properties"):
        return [schema]
    inner = [*schema.get("anyOf", ()), *([schema["items"]] if isinstance(schema.get("items"), dict) else ())]
    return [found for part in inner for found in _objects(document, part)]


def _kind(document: dict[str, Any], schema: dict[str, Any]) -> str:
    """A schema in a few words, such as "list of string"."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        words = " or ".join(dict.fromkeys(_kind(document, part) for part in schema["anyOf"]))
    elif "enum" in schema:
        words = " or ".join(repr(value) if isinstance(value, str) else str(value) for value in schema["enum"])
    elif "const" in schema:
        words = repr(schema["const"])
    elif schema.get("type") == "array":
        words = f"list of {_kind(document, schema.get('items', {}))}"
    else:
        words = str(schema.get("type", "any value"))
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "from"), ("maximum", "to"), ("maxLength", "length to"), ("maxItems", "to"))
        if key in schema
    ]
    default = [f"default {schema['default']!r}"] if schema.get("default") not in (None, [], {}) else []
    return ", ".join([words.replace(" or null", ""), *bounds, *default])
