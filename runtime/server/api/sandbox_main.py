"""`python -m icc.runtime.server.api.sandbox_main`: renders templates and checks grammars, over its pipes.

Both run libraries on a client's text, which can make them take much memory or time. That ends only this small process,
and the next request starts another.
"""

from __future__ import annotations

import contextlib
import resource
import sys

import msgspec

from ...errors import RequestError, install
from ...grammars.compiling import lowered
from ...grammars.sources import of_schema
from ...parent import die_with_parent
from ...templates.source import TemplateSource
from ...templates.template import ChatTemplate, TemplateRefused
from ...templates.template_input import TemplateInput, rendered

MEMORY_BYTES = 1 << 30  # of address space


class Setup(msgspec.Struct, tag="setup"):
    """The first message: the engine's templates, see TemplateSource."""

    template: str
    special_tokens: dict[str, str]
    named: dict[str, str] = {}


class CheckGrammar(msgspec.Struct, tag="grammar"):
    """grammar: a text of `grammars.sources`; the answer is the lowered grammar."""

    grammar: str


class SandboxAnswer(msgspec.Struct):
    """`error`: why the request was refused, "" if it was not."""

    text: str = ""
    error: str = ""


def answer(template: ChatTemplate | None, request: TemplateInput | CheckGrammar) -> SandboxAnswer:
    """The rendered conversation, or the lowered grammar; the text of the error if the request is refused. template:
    None if the model has none."""
    if isinstance(request, CheckGrammar):
        try:
            return SandboxAnswer(lowered(request.grammar))
        except RequestError as error:
            return SandboxAnswer(error=error.message)
        except ModuleNotFoundError as error:
            return SandboxAnswer(error=f"{error.name} is not installed: {install('structured')}")
    if template is None:
        return SandboxAnswer(error="the model has no chat template: serve it with --chat-template FILE")
    try:
        return SandboxAnswer(rendered(template, request))
    except RequestError as error:
        return SandboxAnswer(error=error.message)


def main() -> None:
    """Answer requests from standard input until it ends, within MEMORY_BYTES: each message is its length in 4 bytes,
    then JSON."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(
        ModuleNotFoundError
    ):  # `icc batch` works without these packages, except for requests with grammars
        lowered(of_schema(True))  # imports its modules before the first request
    decoder = msgspec.json.Decoder(Setup | TemplateInput | CheckGrammar)
    template: ChatTemplate | None = None
    while size := sys.stdin.buffer.read(4):
        request = decoder.decode(sys.stdin.buffer.read(int.from_bytes(size, "little")))
        if isinstance(request, Setup):
            try:
                source = TemplateSource(request.template, request.special_tokens, request.named)
                template = source.open()
                reply = SandboxAnswer()
            except TemplateRefused as error:
                reply = SandboxAnswer(error=error.message)
        else:
            reply = answer(template, request)
        body = msgspec.json.encode(reply)
        sys.stdout.buffer.write(len(body).to_bytes(4, "little") + body)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
