"""From a request body to what the engine is sent: tokens, sampling parameters, a grammar and a price."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ...errors import RequestError
from ...requests.params import SamplingParams
from ...templates.messages import prepared_message
from ..engine.admission import Price
from ..engine.messages import Submit
from . import limits, structured
from .errors import HttpError
from .keys import ApiKeys
from .model import ServedModel
from .requests import ChatRequest, Common, CompletionRequest, EmbeddingRequest, Tool, prompts
from .sandbox import Sandbox
from .sandbox_main import Render
from .tools import ToolFormat, called_tools, tool_grammar

_SLOW_CHARS = 16 << 10  # a longer text is tokenized in a thread, so that the loop goes on
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class Job:
    """A request, ready to be sent: one Submit per prompt. `tool_format` is set if the answer may hold tool calls."""

    submits: list[Submit]
    price: Price
    deadline: float | None
    tool_format: ToolFormat | None = None
    prompt_texts: list[str] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(submit.prompt) for submit in self.submits)


class Jobs:
    """Makes jobs for one model. RequestError for what a client has wrong."""

    def __init__(self, model: ServedModel, sandbox: Sandbox, keys: ApiKeys, max_seconds: float | None = None) -> None:
        self.model, self._sandbox, self._keys = model, sandbox, keys
        self._max_seconds = max_seconds  # the deadline of requests that set none, and the latest that they may set
        self.tool_format: ToolFormat | None = None  # of the model's template; found when the server starts

    async def completion(self, request: CompletionRequest, client: str) -> Job:
        try:
            given = prompts(request.prompt)
        except (ValueError, msgspec.ValidationError) as error:
            raise RequestError(f"prompt: {error}", field="prompt") from error
        tokens = [await self.encode(item) if isinstance(item, str) else self._check(item) for item in given]
        texts = [item if isinstance(item, str) else self.model.text(item) for item in given] if request.echo else []
        max_tokens = request.max_tokens or _DEFAULT_COMPLETION_TOKENS
        grammar = await self._grammar(structured.of_format(request.response_format))
        scored = request.logprobs if request.echo else None
        return self._job(request, client, tokens, max_tokens, request.logprobs, grammar, scored, prompt_texts=texts)

    async def embedding(self, request: EmbeddingRequest, client: str) -> Job:
        try:
            given = prompts(request.input, limits.INPUTS)
        except (ValueError, msgspec.ValidationError) as error:
            raise RequestError(f"input: {error}", field="input") from error
        facts = self.model.manifest.embedding
        assert facts is not None
        if request.dimensions is not None and request.dimensions > facts.dimension:
            raise RequestError(f"dimensions: the model's vectors have {facts.dimension}", field="dimensions")
        tokens = []
        for item in given:
            tokens.append(await self.encode(item) if isinstance(item, str) else self._check(item, "input"))
            await asyncio.sleep(0)  # there may be thousands
        if not min(map(len, tokens)) and self.model.manifest.model.bos_token_id is None:
            raise RequestError("an input is empty", field="input")
        self._check_length(max(map(len, tokens)), "input")
        salt = self._keys.salt(client, request.cache_salt)
        deadline = self._deadline(request.deadline)
        params = SamplingParams(max_tokens=1)
        submits = [
            Submit(0, tuple(prompt), params, request.priority, client, salt, deadline=deadline) for prompt in tokens
        ]
        return Job(submits, Price.of_embeddings([len(prompt) for prompt in tokens], facts.dimension), deadline)

    async def chat(self, request: ChatRequest, client: str) -> Job:
        tools = _shown_tools(request)
        tokens = [await self.chat_tokens(request)]
        grammar = structured.of_format(request.response_format)
        if tools is not None and self.tool_format is None:
            raise RequestError("this model's chat template has no tool format that icc can read", field="tools")
        if tools is not None and called_tools(request.tool_choice, tools):
            assert self.tool_format is not None
            grammar = tool_grammar(self.tool_format, called_tools(request.tool_choice, tools))
        elif request.tool_choice not in (None, "none", "auto"):
            raise HttpError(404, "tool_choice names no tool of `tools`", "tool_choice", "tool_not_found")
        top = (request.top_logprobs or 0) if request.logprobs or request.top_logprobs else None
        max_tokens = request.max_completion_tokens or request.max_tokens
        grammar = await self._grammar(grammar)
        return self._job(
            request, client, tokens, max_tokens, top, grammar, tool_format=self.tool_format if tools else None
        )

    async def chat_tokens(self, request: ChatRequest) -> list[int]:
        """The prompt that a conversation is, as the model's template has it."""
        tools = _shown_tools(request)
        rendered = await self._sandbox.render(
            Render(
                [prepared_message(msgspec.to_builtins(message)) for message in request.messages],
                None if tools is None else [msgspec.to_builtins(tool) for tool in tools],
                variables={} if request.chat_template_kwargs is None else dict(request.chat_template_kwargs),
            )
        )
        return await self.encode(rendered, add_special_tokens=False)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. RequestError if the engine has no tokenizer."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise RequestError("the engine has no tokenizer: give token ids", field="prompt")
        if len(text) > _SLOW_CHARS:
            return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
        return tokenizer.encode(text, add_special_tokens)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _check(self, tokens: Sequence[int], field: str = "prompt") -> list[int]:
        wrong = next((token for token in tokens if token >= self.model.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is not in the vocabulary of {self.model.vocab_size}", field=field)
        return list(tokens)

    def _check_length(self, longest: int, field: str = "prompt") -> None:
        if longest > self.model.max_len:
            raise RequestError(
                f"the {field} has {longest} tokens, the model takes at most {self.model.max_len}", field=field
            )

    def _deadline(self, asked: float | None) -> float | None:
        return min((seconds for seconds in (asked, self._max_seconds) if seconds is not None), default=None)

    async def _grammar(self, grammar: str) -> str:
        if grammar:
            if not self.model.manifest.model.eos_token_ids or self.model.tokenizer is None:
                raise RequestError("this model has no end token, which a grammar needs", field="response_format")
            return await self._sandbox.lower(grammar)
        return ""

    def _job(
        self,
        request: Common,
        client: str,
        tokens: list[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        grammar: str,
        scored: int | None = None,
        *,
        tool_format: ToolFormat | None = None,
        prompt_texts: Sequence[str] = (),
    ) -> Job:
        longest = max(len(prompt) for prompt in tokens)
        self._check_length(longest)
        room = max(self.model.max_len - longest, 1)
        limit = room if max_tokens is None else min(max_tokens, room)
        params = _sampling(request, limit, logprobs, self.model.vocab_size)
        if grammar:  # which decides itself when the answer ends
            params = replace(params, ignore_eos=False, min_tokens=0)
        self._check(request.stop_token_ids or (), "stop_token_ids")
        salt = self._keys.salt(client, request.cache_salt)
        deadline = self._deadline(request.deadline)
        return Job(
            [
                Submit(0, tuple(prompt), params, request.priority, client, salt, grammar, scored, deadline)
                for prompt in tokens
            ],
            Price.of([len(prompt) for prompt in tokens], request.n, limit, logprobs),
            deadline,
            tool_format,
            list(prompt_texts),
        )


def _shown_tools(request: ChatRequest) -> list[Tool] | None:
    """The tools that the model may call; None for none."""
    return None if request.tool_choice == "none" or not request.tools else request.tools


def _sampling(request: Common, max_tokens: int, logprobs: int | None, vocab_size: int) -> SamplingParams:
    """Biases of tokens that the vocabulary does not have change nothing and are left out."""
    stop = request.stop
    biases = {int(token): value for token, value in (request.logit_bias or {}).items()}
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias={token: value for token, value in biases.items() if token < vocab_size},
        seed=request.seed,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
        min_tokens=min(request.min_tokens, max_tokens),
        logprobs=logprobs,
        n=request.n,
    )
