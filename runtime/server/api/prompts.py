"""Prompts of requests as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...embed_prompts import EmbedOptions
from ...errors import RequestError
from ...query import Query
from .errors import context_overflow
from .fill import fill_marks
from .model import ServedModel

_SLOW_CHARS = 16 << 10  # a longer text is tokenized in a thread, so that the event loop is not blocked


class Prompts:
    """Makes the prompts of one model. RequestError for a client's mistake."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. RequestError if the engine has no tokenizer."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise RequestError("the engine has no tokenizer: give token ids", field="prompt")
        if len(text) > _SLOW_CHARS:
            return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
        return tokenizer.encode(text, add_special_tokens)

    async def tokens(
        self, prompt: str | list[int], add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """Token ids of a prompt that is a text, or token ids."""
        return await self.encode(prompt, add_special_tokens) if isinstance(prompt, str) else self.check(prompt, field)

    async def embedded(self, text: str | list[int], options: EmbedOptions) -> Query:
        """The query of a text, or of token ids, to embed."""
        prompting = self.model.prompting
        if not isinstance(text, str):
            without: EmbedOptions = {**options, "prompt": None, "prompt_name": None}
            return prompting.embedding(self.check(text, "input"), without)
        if len(text) > _SLOW_CHARS:
            return await asyncio.to_thread(prompting.embedding, text, options)
        return prompting.embedding(text, options)

    async def pair(self, query: str, document: str, longest: int | None) -> Query:
        """The query of a pair of texts for reranking, cut to `longest` tokens; None: not cut. RequestError without a
        tokenizer."""
        if self.model.tokenizer is None:
            raise RequestError("the engine has no tokenizer, and takes no texts", field="documents")
        prompting = self.model.prompting
        return await asyncio.to_thread(prompting.pair, query, document, longest)

    def check(self, tokens: Sequence[int], field: str = "prompt") -> list[int]:
        """The token ids of a client, unchanged. RequestError if one is not in the vocabulary."""
        wrong = next((token for token in tokens if token >= self.model.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is not in the vocabulary of {self.model.vocab_size}", field=field)
        return list(tokens)

    def check_length(self, longest: int, field: str, generates: bool) -> None:
        """HttpError 400 for a prompt that is too long, or that fills the context if tokens are to be generated.
        longest: its length in tokens."""
        if longest > self.model.max_len or (generates and longest == self.model.max_len):
            raise context_overflow(self.model.max_len, longest, field)

    def truncate(self, tokens: list[int], most: int | None) -> list[int]:
        """The last `most` of the tokens; None or 0: all; -1: as many as fit with one generated token."""
        keep = self.model.max_len - 1 if most == -1 else most or 0
        return tokens[-keep:] if most is not None and most and len(tokens) > keep else tokens

    async def fill(self, prompt: str | list[int], suffix: str) -> list[int]:
        """The token ids of a prompt to fill in the text between `prompt` and `suffix`. RequestError if the vocabulary
        has no tokens for that."""
        tokenizer = self.model.tokenizer
        marks = None if tokenizer is None else fill_marks(tokenizer)
        if marks is None:
            raise RequestError("suffix: this model's vocabulary has no tokens for filling in", field="suffix")
        before = await self.tokens(prompt, False)
        return [marks[0], *before, marks[1], *await self.encode(suffix, False), marks[2]]

    async def forbidden(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at the beginning of a text and after a blank, without duplicates."""
        found = [tuple(await self.encode(text, False)) for word in words for text in (word, " " + word.lstrip())]
        return tuple(dict.fromkeys(tokens for tokens in found if tokens))
