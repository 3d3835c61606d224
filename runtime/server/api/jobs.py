"""From a request body to what the engine is sent: tokens, sampling parameters, a grammar and a price."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from ...errors import RequestError
from ...prompting import Encoded
from ...reading.forced import tool_grammar
from ...reading.formats import AnswerFormat
from ...reading.history import fitted
from ...reading.ids import maker_of_ids
from ...reading.reader import AnswerReader
from ...requests.params import SamplingParams
from ..engine.admission import Price
from ..engine.messages import Submit
from . import limits, structured
from .constraints import format_of
from .conversation import AssistantMessage
from .errors import conflict
from .keys import ApiKeys
from .model import ServedModel
from .offers import Offer, offer_of
from .prompts import Prompts
from .requests import ChatRequest, Common, CompletionRequest, EmbeddingRequest, RerankRequest, prompts
from .sampling import sampling
from .sandbox import Sandbox
from .sandbox_main import Render

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class Job:
    """A request, ready to be sent: one Submit per prompt.

    read: makes a reader for one answer, if that may hold more than words; thinks: whether that may be thoughts. offer:
    the tools that may be called. prompt_texts: of completions that begin with their prompts. prompt_logprobs: how many
    of the likeliest tokens are wanted per position of the prompt.
    """

    submits: list[Submit]
    price: Price
    deadline: float | None
    read: Callable[[], AnswerReader] | None = None
    thinks: bool = False
    offer: Offer = field(default_factory=Offer)
    prompt_texts: list[str] = field(default_factory=list)
    prompt_logprobs: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(submit.prompt) for submit in self.submits)


class Jobs:
    """Makes jobs for one model. RequestError, or HttpError, for what a client has wrong."""

    def __init__(self, model: ServedModel, sandbox: Sandbox, keys: ApiKeys, max_seconds: float | None = None) -> None:
        self.model, self._sandbox, self._keys = model, sandbox, keys
        self.prompts = Prompts(model)
        self._max_seconds = max_seconds  # the deadline of requests that set none, and the latest that they may set
        self.form = AnswerFormat()  # of the model's answers; found in its template when the server starts

    async def completion(self, request: CompletionRequest, client: str) -> Job:
        try:
            given = prompts(request.prompt)
        except (ValueError, msgspec.ValidationError) as error:
            raise RequestError(f"prompt: {error}", field="prompt") from error
        if request.suffix:
            tokens = [await self.prompts.fill(item, request.suffix) for item in given]
        else:
            special = request.add_special_tokens is not False
            tokens = [await self.prompts.tokens(item, special) for item in given]
        tokens = [self.prompts.truncate(prompt, request.truncate_prompt_tokens) for prompt in tokens]
        texts = []
        if request.echo:
            whole = request.truncate_prompt_tokens is None
            texts = [
                item if whole and isinstance(item, str) else self.model.text(prompt)
                for item, prompt in zip(given, tokens, strict=True)
            ]
        max_tokens = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        grammar = await self._grammar(structured.of_format(format_of(request)))
        best_of = request.best_of or request.n
        if best_of < request.n:
            raise conflict(f"best_of = {best_of}: must be at least n = {request.n}", "best_of")
        if best_of > request.n and request.stream:
            raise conflict("best_of: the best are known at the end, not in a stream", "best_of")
        logprobs = 0 if request.logprobs is None and best_of > request.n else request.logprobs
        scored = request.logprobs if request.echo else None
        return await self._job(
            request, client, tokens, max_tokens, logprobs, grammar, scored, best_of, prompt_texts=texts
        )

    async def embedding(self, request: EmbeddingRequest, client: str) -> Job:
        try:
            given = prompts(request.input, limits.INPUTS)
        except (ValueError, msgspec.ValidationError) as error:
            raise RequestError(f"input: {error}", field="input") from error
        facts = self.model.manifest.embedding
        assert facts is not None
        if request.dimensions is not None and request.dimensions > facts.dimension:
            raise RequestError(f"dimensions: the model's vectors have {facts.dimension}", field="dimensions")
        options, prompted = request.options, list[Encoded]()
        for item in given:
            prompted.append(await self.prompts.embedded(item, options))
            await asyncio.sleep(0)  # there may be thousands
        lengths = [len(prompt.token_ids) for prompt in prompted]
        if not min(lengths) and self.model.manifest.model.bos_token_id is None:
            raise RequestError("an input is empty", field="input")
        self.prompts.check_length(max(lengths), "input", generates=False)
        salt = self._keys.salt(client, request.cache_salt)
        return self._readings(prompted, request, client, salt, facts.dimension)

    async def rerank(self, request: RerankRequest, client: str) -> Job:
        longest = request.truncate_prompt_tokens
        longest = self.model.max_len if longest == -1 else longest
        pairs = [await self.prompts.pair(request.query, document, longest) for document in request.texts]
        self.prompts.check_length(max(len(pair.token_ids) for pair in pairs), "documents", generates=False)
        return self._readings(pairs, request, client, b"", 1)

    def _readings(
        self,
        prompts: Sequence[Encoded],
        request: EmbeddingRequest | RerankRequest,
        client: str,
        salt: bytes,
        width: int,
    ) -> Job:
        """Prompts of each of which a vector of so many numbers is wanted."""
        deadline, params = self._deadline(request.deadline), SamplingParams(max_tokens=1)
        submits = [
            Submit(
                0, tuple(prompt.token_ids), params, request.priority, client, salt, deadline=deadline,
                skipped=prompt.skipped, extras=dict(prompt.extras),
            )
            for prompt in prompts
        ]  # fmt: skip
        return Job(submits, Price.of_embeddings([len(prompt.token_ids) for prompt in prompts], width), deadline)

    async def chat(self, request: ChatRequest, client: str) -> Job:
        offer, form = offer_of(request), self.form
        if offer.tools and form.calls is None:
            raise RequestError("this model's chat template has no tool format that icc can read", field="tools")
        if request.prompt_logprobs is not None and request.stream:
            raise conflict("prompt_logprobs: a streamed answer cannot have them", "prompt_logprobs")
        grammar = structured.of_format(format_of(request))
        prompt = await self._prompt(request, offer)
        if offer.must:
            if grammar:
                raise conflict("tool_choice: a call cannot follow a response_format too", "tool_choice")
            special_tokens = {} if self.model.tokenizer is None else self.model.tokenizer.special_tokens
            end_ids = self.model.manifest.model.eos_token_ids
            grammar = tool_grammar(form, offer.schemas, offer.most, special_tokens, end_ids)
        if grammar and not (offer.must and form.messages):
            prompt = form.without_thought(prompt)
        read = None if grammar and not offer.must else self._reader(request, offer, prompt)
        tokens = await self._encode_prompt(request, prompt)
        top = (request.top_logprobs or 0) if request.logprobs or request.top_logprobs else None
        max_tokens = request.max_completion_tokens or request.max_tokens
        return await self._job(
            request,
            client,
            [tokens],
            max_tokens,
            top,
            await self._grammar(grammar, "tools" if offer.must else "response_format"),
            read=read,
            thinks=read is not None and (form.thinking is not None or form.messages),
            offer=offer,
        )

    async def chat_tokens(self, request: ChatRequest) -> list[int]:
        """The prompt that a conversation is, as the model's template has it."""
        return await self._encode_prompt(request, await self._prompt(request, offer_of(request)))

    async def _encode_prompt(self, request: ChatRequest, prompt: str) -> list[int]:
        tokens = await self.prompts.encode(prompt, add_special_tokens=bool(request.add_special_tokens))
        return self.prompts.truncate(tokens, request.truncate_prompt_tokens)

    async def _prompt(self, request: ChatRequest, offer: Offer) -> str:
        """A conversation as text, up to where the answer begins, or goes on."""
        goes_on = request.continue_final_message
        if goes_on and request.add_generation_prompt:
            raise conflict(
                "continue_final_message: the answer goes on with the last message, which add_generation_prompt ends",
                "continue_final_message",
            )
        variables = {name: getattr(request, name) for name in ("reasoning_effort", "verbosity")}
        variables = {name: value for name, value in variables.items() if value is not None}
        if request.reasoning_effort == "none":
            variables["enable_thinking"] = False
        if request.documents:
            variables["documents"] = request.documents
        self.model.template.check(request.chat_template)
        return await self._sandbox.render(
            Render(
                fitted([msgspec.to_builtins(message) for message in request.messages], self.form),
                [msgspec.to_builtins(tool) for tool in offer.tools] or None,
                not goes_on and request.add_generation_prompt is not False,
                goes_on,
                {**variables, **(request.chat_template_kwargs or {})},
                request.chat_template,
            )
        )

    def _reader(self, request: ChatRequest, offer: Offer, prompt: str) -> Callable[[], AnswerReader] | None:
        """Makes readers for the answers, if they may hold more than words."""
        form = self.form
        if not (offer.tools or form.messages or form.thinking is not None):
            return None
        last = request.messages[-1]
        goes_on = request.continue_final_message and isinstance(last, AssistantMessage)
        thinking = form.thinks_after(prompt, str(last.content) if goes_on else "")
        said = [message.tool_calls or () for message in request.messages if isinstance(message, AssistantMessage)]
        make_id = maker_of_ids(form, sum(map(len, said)))
        return partial(AnswerReader, form, offer.schemas, offer.most, thinking=thinking, begun=goes_on, make_id=make_id)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _deadline(self, asked: float | None) -> float | None:
        return min((seconds for seconds in (asked, self._max_seconds) if seconds is not None), default=None)

    async def _grammar(self, grammar: str, field: str = "response_format") -> str:
        if grammar:
            if not self.model.manifest.model.eos_token_ids or self.model.tokenizer is None:
                raise RequestError("this model has no end token, which a grammar needs", field=field)
            return await self._sandbox.lower(grammar, field)
        return ""

    async def _job(
        self,
        request: Common,
        client: str,
        tokens: list[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        grammar: str,
        scored: int | None = None,
        completions: int | None = None,
        *,
        read: Callable[[], AnswerReader] | None = None,
        thinks: bool = False,
        offer: Offer | None = None,
        prompt_texts: Sequence[str] = (),
    ) -> Job:
        longest, n = max(len(prompt) for prompt in tokens), completions or request.n
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        self.prompts.check_length(longest, field, max_tokens != 0)
        room = self.model.max_len - longest
        limit = room if max_tokens is None else min(max_tokens, room)
        params = sampling(request, limit, logprobs, self.model.vocab_size)
        words = await self.prompts.forbidden(request.bad_words or ())
        shows = request.skip_special_tokens and not (read is not None and self.form.special)
        params = replace(params, n=n, bad_words=words, skip_special_tokens=shows)
        params = params.resolve(self.model.manifest.sampling.of_conversations())
        if grammar and (words or params.allowed_token_ids is not None):
            name = "bad_words" if words else "allowed_token_ids"
            raise conflict(f"{name}: what may come is said by a grammar already", name)
        if params.allowed_token_ids is not None and {(token,) for token in params.allowed_token_ids} <= set(words):
            raise conflict("bad_words: forbid all allowed_token_ids", "bad_words")
        if grammar:
            params = params.of_a_form()
        for name in ("stop_token_ids", "allowed_token_ids"):
            self.prompts.check(getattr(request, name) or (), name)
        if request.prompt_logprobs is not None:
            scored = max(request.prompt_logprobs, scored or 0)
        salt = self._keys.salt(client, request.cache_salt)
        deadline = self._deadline(request.deadline)
        most = max((one for one in (logprobs, scored) if one is not None), default=None)
        return Job(
            [
                Submit(0, tuple(prompt), params, request.priority, client, salt, grammar, scored, deadline)
                for prompt in tokens
            ],
            Price.of([len(prompt) for prompt in tokens], n, limit, most),
            deadline,
            read,
            thinks,
            offer or Offer(),
            list(prompt_texts),
            request.prompt_logprobs or 0,
        )
