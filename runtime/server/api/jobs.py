"""Makes jobs from request bodies: tokens, sampling parameters, a grammar and a price."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from ...chat_options import TemplateOptions
from ...chat_turn import ChatTurn
from ...embed_prompts import check_prompt_name
from ...errors import RequestError
from ...query import Query, adapted
from ...reading.answer import MakeReader
from ...requests.params import SamplingParams
from ...requests.request import Standing
from ...templates.template_input import TemplateInput
from ...watermark.settings import Watermark
from ..engine.admission import Price
from ..engine.messages import Submit
from . import limits, structured
from .adapters import ServedAdapters
from .asking import Asking, R
from .constraints import format_of
from .conversation import question_of
from .errors import HttpError, conflict
from .keeping import seconds_of
from .keys import ApiKeys
from .model import ServedModel
from .offers import Offer, offer_of
from .prices import Prices
from .prompts import Prompts
from .requests import AdapterScale, ChatRequest, Common, CompletionRequest, EmbeddingRequest, RerankRequest, prompts
from .sampling import check_allowed, check_best, sampling, watermark_of, width
from .sandbox import Sandbox
from .transfers import with_transfer

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class Job:
    """A request, ready to be sent: one Submit per prompt.

    deadline: seconds after which the request ends, None for no end. read: makes a parser for one answer; None if
    answers are only text. thinks: whether an answer may hold thoughts. offer: the tools that may be called.
    prompt_texts: the prompts, if completions begin with them. prompt_logprobs: how many of the likeliest tokens are
    wanted per position of the prompt. best: how many completions of each prompt are returned, None for all; questions:
    the question of each prompt, for the judge of the completions. prices: of tokens, None if unknown. kept: how many
    tokens of the prompt cache_control asks to keep.
    """

    submits: list[Submit]
    price: Price
    deadline: float | None
    read: MakeReader | None = None
    thinks: bool = False
    offer: Offer = field(default_factory=Offer)
    prompt_texts: list[str] = field(default_factory=list)
    prompt_logprobs: int = 0
    best: int | None = None
    questions: list[str] = field(default_factory=list)
    prices: Prices | None = None
    kept: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(submit.prompt) for submit in self.submits)


def _chooses(request: Common) -> bool:
    """Whether more completions are generated than returned."""
    return width(request) > request.n and not request.use_beam_search


class Wanted(NamedTuple):
    """What a request wants for each prompt. max_tokens: None for as many as the context allows; logprobs: how many of
    the likeliest tokens per position, None for no probabilities."""

    max_tokens: int | None
    logprobs: int | None


class Jobs:
    """Makes jobs for one model. RequestError or HttpError for a client's mistake. gives_only: only accept prompts whose
    KV goes to another server."""

    def __init__(
        self,
        model: ServedModel,
        sandbox: Sandbox,
        keys: ApiKeys,
        max_seconds: float | None = None,
        adapters: ServedAdapters | None = None,
        watermark: Watermark | None = None,
        prices: Prices | None = None,
        gives_only: bool = False,
    ) -> None:
        self.model, self._sandbox, self._keys, self.adapters = model, sandbox, keys, adapters
        self.prompts = Prompts(model)
        self._watermark, self._prices = watermark, prices  # for every answer
        self._gives_only = gives_only
        self._max_seconds = max_seconds  # the deadline of requests that set none, and the latest that they may set

    def check_model(self, name: str | None) -> None:
        """HttpError 404 unless the name is that of the served model or of an adapter; None is the model itself."""
        if name is None or name in self.model.names:
            return
        if self.adapters is None or not self.adapters.knows(name):
            raise HttpError(
                404,
                f"the model {name[:80]!r} does not exist; this server has {', '.join(map(repr, self.model.names))}",
                "model",
                "model_not_found",
            )

    def salt(self, client: str, name: str | None) -> bytes:
        """The salt that separates the cached prefixes of this client, and of this cache_salt; None for no
        cache_salt."""
        return self._keys.salt(client, name)

    def named(self, request: R) -> R:
        """The request with a model name: its own, or that of the served model if it has none. HttpError 404 for an
        unknown model."""
        if not request.model:
            return msgspec.structs.replace(request, model=self.model.name)  # type: ignore[type-var]
        self.check_model(request.model)
        return request

    async def completion(self, request: CompletionRequest, client: str) -> Job:
        """The job of a completion request: a Submit per prompt. RequestError if `prompt` does not match
        PROMPT_SCHEMA."""
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
        check_best(request)
        scored = request.logprobs if request.echo else None
        max_tokens = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        grammar = structured.of_format(format_of(request))
        params = await self._params(request, max(map(len, tokens)), Wanted(max_tokens, request.logprobs))
        queries = [self.model.prompting.constrained(prompt, params, grammar) for prompt in tokens]
        job = await self._job(request, client, queries, scored=scored)
        if job.best is not None:
            questions = [self.model.text(prompt) for prompt in tokens]
            job = replace(job, questions=questions)
        return replace(job, prompt_texts=texts)

    async def embedding(self, request: EmbeddingRequest, client: str) -> Job:
        """The job of an embedding request: a Submit per input. RequestError if an input is empty, too long or of a
        wrong type, or for more dimensions than the model has."""
        try:
            given = prompts(request.input, limits.INPUTS)
        except (ValueError, msgspec.ValidationError) as error:
            raise RequestError(f"input: {error}", field="input") from error
        facts = self.model.manifest.embedding
        assert facts is not None
        if request.dimensions is not None and request.dimensions > facts.dimension:
            raise RequestError(
                f"dimensions: must be from 1 to the {facts.dimension} of the model's vectors", field="dimensions"
            )
        for name in ("prompt_name", "input_type", "task"):  # whether or not a text uses them
            check_prompt_name(self.model.manifest, getattr(request, name), name)
        options, prompted = request.options, list[Query]()
        for item in given:
            prompted.append(await self.prompts.embedded(item, options))
            await asyncio.sleep(0)  # gives way to other tasks: there may be thousands
        lengths = [len(prompt.token_ids) for prompt in prompted]
        if not min(lengths) and self.model.manifest.model.bos_token_id is None:
            raise RequestError("an input is empty", field="input")
        self.prompts.check_length(max(lengths), "input", generates=False)
        salt = self.salt(client, request.cache_salt)
        return await self._readings(prompted, request, client, salt, facts.dimension)

    async def rerank(self, request: RerankRequest, client: str) -> Job:
        """The job of a rerank request: a Submit per pair of the query and a document."""
        longest = request.truncate_prompt_tokens
        longest = self.model.max_len if longest == -1 else longest
        pairs = [await self.prompts.pair(request.query, document, longest) for document in request.texts]
        self.prompts.check_length(max(len(pair.token_ids) for pair in pairs), "documents", generates=False)
        return await self._readings(pairs, request, client, b"", 1)

    async def _readings(
        self,
        queries: Sequence[Query],
        request: Asking,
        client: str,
        salt: bytes,
        width: int,
    ) -> Job:
        """The job of prompts for each of which a vector of `width` numbers is wanted."""
        submits, deadline = await self.sent(queries, request, client, salt)
        return Job(submits, Price.of_embeddings([len(query.token_ids) for query in queries], width), deadline)

    async def sent(
        self, queries: Sequence[Query], request: Asking, client: str, salt: bytes
    ) -> tuple[list[Submit], float | None]:
        """The Submits of queries, and their deadline in seconds, None for no end. salt: separates their cached
        prefixes."""
        standing, deadline = Standing(request.priority, client, salt), self._deadline(request.deadline)
        queries = adapted(queries, *await self._adapter(request.model, None))
        return [Submit.of(query, standing, deadline) for query in queries], deadline

    async def chat(self, request: ChatRequest, client: str) -> Job:
        """The job of a chat request: one Submit, with a parser if the answer may hold calls or thoughts."""
        prompting, offer = self.model.prompting, offer_of(request)
        check_best(request)
        grammar = structured.of_format(format_of(request))
        if request.prompt_logprobs is not None and request.stream:
            raise conflict("prompt_logprobs: a streamed answer cannot have them", "prompt_logprobs")
        if offer.must and grammar:
            raise conflict("tool_choice: a call cannot follow a response_format too", "tool_choice")
        given = self._given(request, offer)
        text = await self._sandbox.render(given)  # raises if there is no usable template
        turn = ChatTurn(given, prompting.form, offer, grammar)
        prompt = turn.prompt(text)
        tokens = await self._encode_prompt(request, prompt)
        logprobs = (request.top_logprobs or 0) if request.logprobs or request.top_logprobs else None
        max_tokens = request.max_completion_tokens or request.max_tokens
        params = await self._params(request, len(tokens), Wanted(max_tokens, logprobs))
        query = prompting.answer(turn, prompt, tokens, params)
        job = await self._job(request, client, [query], "response_format" if grammar else "tools")
        if job.best is not None:
            job = replace(job, questions=[question_of(request.messages)])
        return replace(job, read=query.read, thinks=turn.thinks, offer=offer)

    async def chat_tokens(self, request: ChatRequest) -> list[int]:
        """The token ids of a conversation in the model's chat template."""
        return await self._encode_prompt(request, await self.rendered(request))

    async def rendered(self, request: ChatRequest) -> str:
        """The text of a conversation in the model's chat template."""
        return await self._sandbox.render(self._given(request, offer_of(request)))

    async def _encode_prompt(self, request: ChatRequest, prompt: str) -> list[int]:
        tokens = await self.prompts.encode(prompt, add_special_tokens=bool(request.add_special_tokens))
        return self.prompts.truncate(tokens, request.truncate_prompt_tokens)

    def _given(self, request: ChatRequest, offer: Offer) -> TemplateInput:
        """The template's input for a conversation, up to where the answer begins or continues."""
        if request.continue_final_message and request.add_generation_prompt:
            raise conflict(
                "continue_final_message contradicts add_generation_prompt, which ends the last message",
                "continue_final_message",
            )
        variables = {name: getattr(request, name) for name in ("reasoning_effort", "verbosity")}
        variables = {name: value for name, value in variables.items() if value is not None}
        if request.reasoning_effort == "none":
            variables["enable_thinking"] = False
        options: TemplateOptions = {
            "documents": request.documents,
            "add_generation_prompt": request.add_generation_prompt is not False,
            "continue_final_message": request.continue_final_message,
            "chat_template": request.chat_template,
            "chat_template_kwargs": {**variables, **(request.chat_template_kwargs or {})},
        }
        messages = [msgspec.to_builtins(message) for message in request.messages]
        return self.model.prompting.given(messages, offer.shown, options)

    # -- parts -------------------------------------------------------------------------------------------------------

    async def _adapter(self, model: str, lora: str | Sequence[AdapterScale] | None) -> tuple[str, float]:
        """The name of a request's loaded adapter, "" for none, and its scale."""
        return ("", 1.0) if self.adapters is None else await self.adapters.scaled(model, lora)

    def _deadline(self, asked: float | None) -> float | None:
        return min((seconds for seconds in (asked, self._max_seconds) if seconds is not None), default=None)

    async def _params(self, request: Common, longest: int, wanted: Wanted) -> SamplingParams:
        """The sampling parameters of a request. longest: tokens of its longest prompt."""
        prompting = self.model.prompting
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        self.prompts.check_length(longest, field, wanted.max_tokens != 0)
        room = prompting.room(longest)
        limit = room if wanted.max_tokens is None else min(wanted.max_tokens, room)
        words = await self.prompts.forbidden(request.bad_words or ())
        logprobs = 0 if wanted.logprobs is None and _chooses(request) else wanted.logprobs
        params = sampling(request, limit, logprobs)
        params = replace(params, bad_words=words, skip_special_tokens=request.skip_special_tokens)
        params = replace(params, watermark=watermark_of(request, self._watermark))
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.prompts.check(tuple(getattr(params, name) or ()), name)
        return prompting.chat_params(params, longest)

    async def _job(
        self,
        request: Common,
        client: str,
        queries: Sequence[Query],
        field: str = "response_format",
        scored: int | None = None,
    ) -> Job:
        """The job of queries with the same parameters. field: the field that asks for their grammar. scored: how many
        of the likeliest tokens are wanted per position of the prompts, besides prompt_logprobs of the request; None for
        none."""
        kv = request.kv_transfer_params
        if self._gives_only and not (kv is not None and kv.do_remote_decode):
            raise RequestError(
                "this server (--role prefill) computes prompts for others: kv_transfer_params lacks do_remote_decode",
                "ask a server of --role decode",
                field="kv_transfer_params",
            )
        queries = adapted(queries, *await self._adapter(request.model, request.lora))
        params, grammar = queries[0].params, queries[0].grammar
        check_allowed(params, grammar)
        lowered = await self._lowered(grammar, field)
        if request.prompt_logprobs is not None:
            scored = max(request.prompt_logprobs, scored or 0)
        standing = Standing(request.priority, client, self.salt(client, request.cache_salt))
        most = max((one for one in (params.logprobs, scored) if one is not None), default=None)
        made = max(params.n, params.beams)
        price = Price.of([len(query.token_ids) for query in queries], made, params.max_tokens, most)
        deadline = self._deadline(request.deadline)
        submits = [
            Submit.of(msgspec.structs.replace(query, grammar=lowered), standing, deadline, scored) for query in queries
        ]
        submits = [with_transfer(submit, kv) for submit in submits]
        if seconds := seconds_of(request):
            submits = [msgspec.structs.replace(one, keep=((len(one.prompt), seconds),)) for one in submits]
        best = request.n if _chooses(request) else None
        scores = request.prompt_logprobs or 0
        return Job(submits, price, deadline, best=best, prompt_logprobs=scores, prices=self._prices)

    async def _lowered(self, grammar: str, field: str) -> str:
        """A grammar lowered for the engine; "" for none."""
        if not grammar:
            return ""
        if not self.model.prompting.follows_grammars:
            raise RequestError("this model has no end token, which a grammar needs", field=field)
        known = self.model.forms.get(grammar)
        return await self._sandbox.lower(grammar, field) if known is None else known
