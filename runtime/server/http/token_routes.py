"""The routes that convert texts and conversations to token ids, and token ids to text."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response
from msgspec import UNSET

from ..api.errors import HttpError
from ..api.requests import ChatRequest, DetokenizeRequest, TokenizeRequest
from ..api.responses import Detokenized, Tokenized
from .bodies import decode_body, json_response
from .openapi import operation
from .parts import ServerParts

_ERRORS = (400, 404, 408, 413)


def add_tokens(app: FastAPI, parts: ServerParts) -> None:
    """Add /tokenize and /detokenize."""

    @app.post("/tokenize", **operation(Tokenized, TokenizeRequest, errors=_ERRORS))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a conversation in the model's template."""
        body = await decode_body(request, TokenizeRequest)
        parts.jobs.check_model(body.model)
        tokens = await _tokens(parts, body)
        texts = [parts.model.token_text(token) for token in tokens] if body.return_token_strs else UNSET
        return json_response(Tokenized(tokens, len(tokens), parts.model.max_len, texts))

    @app.post("/detokenize", **operation(Detokenized, DetokenizeRequest, errors=_ERRORS))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await decode_body(request, DetokenizeRequest)
        parts.jobs.check_model(body.model)
        if parts.model.tokenizer is None or any(token >= parts.model.vocab_size for token in body.tokens):
            raise HttpError(400, "a token id is not in the vocabulary", "tokens", "invalid_value")
        return json_response(Detokenized(parts.model.text(body.tokens)))


async def _tokens(parts: ServerParts, body: TokenizeRequest) -> list[int]:
    if isinstance(body.prompt, str) == isinstance(body.messages, list):
        raise HttpError(400, "give either `prompt` or `messages`", "prompt", "invalid_value")
    if isinstance(body.prompt, str):
        return await parts.jobs.prompts.encode(body.prompt, body.add_special_tokens)
    names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    chat = ChatRequest(model="", **{name: getattr(body, name) for name in names})
    return await parts.jobs.chat_tokens(chat)
