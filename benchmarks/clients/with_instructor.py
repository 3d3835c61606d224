"""instructor: nested models through tools, JSON schemas and Anthropic's API."""

from __future__ import annotations

import anthropic
import instructor
import openai
from features import report, url
from pydantic import BaseModel


class Address(BaseModel):
    city: str
    number: int


class Person(BaseModel):
    name: str
    addresses: list[Address]


USER = [{"role": "user", "content": "hi"}]


def ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url()}/v1", api_key="none"), mode=mode)
    person = client.chat.completions.create(model="scripted", response_model=Person, messages=USER, max_retries=0)
    assert isinstance(person, Person)


def tools() -> None:
    ask(instructor.Mode.TOOLS)


def json_schema() -> None:
    ask(instructor.Mode.JSON_SCHEMA)


def anthropic_tools() -> None:
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=url(), api_key="none"))
    asked = {"model": "scripted", "max_tokens": 400, "messages": USER, "max_retries": 0}
    assert isinstance(client.messages.create(response_model=Person, **asked), Person)


report({f.__name__: f for f in (tools, json_schema, anthropic_tools)})
