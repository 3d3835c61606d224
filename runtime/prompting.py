"""Prompting: turns a caller's input (a text, token ids, a conversation) into queries for the engine loop."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from operator import index
from threading import Thread
from typing import TYPE_CHECKING, Any, Unpack, cast

from msgspec.structs import replace as replace_fields

from .batch.scheduled import NO_EXTRAS, Extras
from .chat_options import ChatOptions, RenderOptions, TemplateOptions
from .errors import MissingExtraError, RequestError, install
from .format.forms import read_forms
from .format.load import Engine
from .format.manifest import Manifest, SamplingDefaults
from .query import Query
from .requests.params import SamplingParams, params_for
from .templates.messages import Messages, is_messages, prepared
from .templates.source import TemplateSource, read_template
from .templates.template_input import TemplateInput, rendered
from .tokenizer import Tokenizer

if TYPE_CHECKING:  # completing a plain text needs none of these
    from .chat_turn import ChatTurn
    from .embed_prompts import EmbedOptions
    from .grammars.constraints import Grammars
    from .reading.formats import AnswerFormat
    from .requests.sampler import Constrain
    from .templates.template import ChatTemplate

Prompt = str | Sequence[int]


class Prompting:
    """Makes an engine's prompts and parameters with its tokenizer, chat template and grammars. RequestError for a
    caller's mistakes.

    template: the source of the chat template; None: it is read from the engine's files. Thread-safe.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        engine: Engine | None = None,
        template: TemplateSource | None = None,
    ) -> None:
        self._manifest, self._tokenizer, self._engine = manifest, tokenizer, engine
        self._forms = [] if engine is None else read_forms(engine.files, manifest)
        if template is not None:
            self.source = template

    @cached_property
    def source(self) -> TemplateSource:
        """The text of the chat template, and its special tokens."""
        return (
            TemplateSource("", {})
            if self._engine is None
            else read_template(self._engine.tokenizer_file, self._manifest.tokenizer_names)
        )

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if the engine has none. TemplateRefused or MissingExtraError if it cannot be used."""
        return self.source.open()

    @cached_property
    def form(self) -> AnswerFormat:
        """How the model writes tool calls and thoughts, found from its template."""
        from .reading.formats import AnswerFormat
        from .reading.probe import find_format, now

        if self.template is None:
            return AnswerFormat()
        return now(find_format(self.source.all_texts, self._probed, self.special_tokens))

    async def _probed(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        return self._rendered(TemplateInput(messages, tools, prompt))

    @property
    def special_tokens(self) -> dict[str, int]:
        """The tokenizer's special tokens with their ids; {} without a tokenizer."""
        return {} if self._tokenizer is None else self._tokenizer.special_tokens

    def use_template(self, given: str) -> None:
        """Use another chat template instead of the engine's, or one of the engine's by name; see
        `TemplateSource.replaced`. TemplateRefused or MissingExtraError if it cannot be used."""
        self.source = self.source.replaced(given)
        self.template = self.source.open()
        self.__dict__.pop("form", None)

    @property
    def follows_grammars(self) -> bool:
        """Whether grammars are possible: they need a tokenizer and an end token."""
        return self._tokenizer is not None and bool(self._manifest.model.eos_token_ids)

    @cached_property
    def grammars(self) -> Grammars | None:
        """The compiler of grammars; None if the engine cannot follow any."""
        if self._tokenizer is None or not self.follows_grammars:
            return None
        from .grammars.constraints import Grammars

        model = self._manifest.model
        return Grammars(self._tokenizer.to_json(), model.vocab_size, model.eos_token_ids, self._forms)

    def prepare(self) -> None:
        """Compile the grammars that the engine was compiled with, in a thread."""
        if self._forms and find_spec("llguidance") is not None and self.grammars is not None:
            Thread(target=self.grammars.prepare, name="compiled grammars", daemon=True).start()

    # -- prompts -----------------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text is tokenized with special tokens; token ids are checked and returned."""
        if isinstance(prompt, str):
            return self._text_tokenizer.encode(prompt)
        return self.ids(prompt)

    def ids(self, prompt: Sequence[int]) -> list[int]:
        """Check token ids and return them. RequestError if they are none: 5.0 is no token id, and a text is no list of
        letters."""
        try:
            return list(map(index, prompt))
        except TypeError as error:
            hint = "a prompt is a text or a list of integers; generate takes a list of prompts"
            raise RequestError(f"the prompt is not token ids: {error}", hint, field="prompt") from error

    def embedding(self, text: Prompt, options: EmbedOptions) -> Query:
        """The query to embed a text; see EmbedOptions."""
        from .embed_prompts import cut, encode_prompted

        if isinstance(text, str):
            ids, skipped = encode_prompted(self._text_tokenizer, self._manifest, text, options)
            return Query(ids, vector=True, skipped=skipped)
        return Query(cut(self.encode(text), self._manifest, options), vector=True)

    def pair(self, query: str, document: str, longest: int | None = None) -> Query:
        """The query to score a pair of texts, with token types if the model takes any (see EmbeddingFacts). longest:
        see Tokenizer.encode_pair; None: no truncation."""
        if not isinstance(query, str) or not isinstance(document, str):
            raise RequestError("query and documents must be texts", field="documents")
        facts = self._manifest.embedding
        if facts is not None and facts.around:
            return Query(self._text_tokenizer.encode_between(facts.around, (query, document), longest), vector=True)
        ids, types = self._text_tokenizer.encode_pair(query, document, longest)
        if facts is not None and facts.types_input:
            return Query(ids, vector=True, extras={facts.types_input: array("i", types).tobytes()})
        if facts is not None and facts.coded_types:
            size = self._manifest.model.vocab_size
            return Query([token + size * kind for token, kind in zip(ids, types, strict=True)], vector=True)
        return Query(ids, vector=True)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> str:
        """The text of a conversation, rendered by the engine's chat template; see RenderOptions."""
        self._check_template()
        return self._rendered(self.given(prepared(messages), tools, options))

    def given(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, options: TemplateOptions
    ) -> TemplateInput:
        """The chat template's input. tools: None if there are none. RequestError if the options name an unknown
        template."""
        from .chat_turn import template_input

        self.source.check(options.get("chat_template"))
        return template_input(messages, self.form, tools, options)

    def _check_template(self) -> None:
        if self.template is None:
            raise RequestError("the engine has no chat template", "complete a text as it is (--raw)", field="messages")

    def _rendered(self, given: TemplateInput) -> str:
        assert self.template is not None
        return rendered(self.template, given)

    def encode_chat(self, messages: Messages, **options: Unpack[RenderOptions]) -> list[int]:
        """Token ids of a conversation. Special tokens are not added, because the template writes them."""
        return self._encode_rendered(self.render(messages, **options))

    def _encode_rendered(self, text: str) -> list[int]:
        return self._text_tokenizer.encode(text, add_special_tokens=False)

    # -- queries -----------------------------------------------------------------------------------------------------

    def queries(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Query]:
        """A query per prompt. params: one for all or one per prompt; None: the engine's defaults."""
        given = params_for(len(prompts), params)
        return [self.completion(self.encode(prompt), one) for prompt, one in zip(prompts, given, strict=True)]

    def query(self, prompt: Prompt | Messages, params: SamplingParams | None, options: ChatOptions) -> Query:
        """The query for a prompt or for messages. params None: the defaults of prompts or of conversations."""
        if is_messages(prompt):
            return self._chat(prompt, params, options)
        if others := [name for name in options if name != "adapter"]:
            raise RequestError(f"{', '.join(others)}: for messages only", "give a list of messages", field="messages")
        query = self.completion(self.encode(cast(Prompt, prompt)), params or SamplingParams())
        return replace_fields(query, adapter=options.get("adapter", ""))

    def chats(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: ChatOptions,
    ) -> list[Query]:
        """A query per conversation. params: one for all or one per conversation; None: the engine's defaults."""
        given = [None] * len(conversations) if params is None else params_for(len(conversations), params)
        return [self._chat(messages, one, options) for messages, one in zip(conversations, given, strict=True)]

    def _chat(self, messages: Messages, params: SamplingParams | None, options: ChatOptions) -> Query:
        from .chat_turn import ChatTurn
        from .reading.tools import offered

        parallel = options.get("parallel_tool_calls") is not False
        tools = offered(options.get("tools"), options.get("tool_choice"), parallel)
        self._check_template()
        given = self.given(prepared(messages), tools.shown, options)
        turn = ChatTurn(given, self.form, tools, "" if params is None else _source_of(params))
        prompt = turn.prompt(self._rendered(given))
        token_ids = self._encode_rendered(prompt)
        query = self.answer(turn, prompt, token_ids, self.chat_params(params, len(token_ids)))
        return replace_fields(query, adapter=options.get("adapter", ""))

    def answer(self, turn: ChatTurn, prompt: str, token_ids: Sequence[int], params: SamplingParams) -> Query:
        """The query for an answer. prompt: the result of `turn.prompt` for the rendered text; token_ids: its tokens."""
        read = turn.reader(prompt)
        if read is not None and turn.form.special:
            params = replace(params, skip_special_tokens=False)
        ends = self._manifest.model.eos_token_ids
        if grammar := turn.source(self.special_tokens, ends):
            return _bound(Query(token_ids, params, grammar, read))
        offered = turn.offered_source(params, self.special_tokens, ends) if self.follows_grammars else ""
        if offered and find_spec("llguidance") is None:  # this grammar only helps the model, so it is optional
            offered = ""
        return Query(token_ids, params, offered, read)

    def completion(self, token_ids: Sequence[int], params: SamplingParams, extras: Extras = NO_EXTRAS) -> Query:
        """The query to complete token ids, under the grammar that the parameters ask for. extras: rows for the engine's
        inputs besides token ids, as bytes by the input's name; tokens without a row get the input's fill."""
        return _bound(Query(token_ids, params, _source_of(params), extras=extras))

    def constrained(self, token_ids: Sequence[int], params: SamplingParams, grammar: str) -> Query:
        """The query to complete token ids under a grammar, a text of `grammars.sources`; "" for any text."""
        return _bound(Query(token_ids, params, grammar))

    @property
    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("the engine has no tokenizer", "give token ids instead of text", field="prompt")
        return self._tokenizer

    # -- parameters --------------------------------------------------------------------------------------------------

    def room(self, prompt_tokens: int) -> int:
        """How many tokens can follow a prompt of `prompt_tokens` tokens; negative if it is too long."""
        return self._manifest.limits.max_seq_len - prompt_tokens

    def chat_params(
        self, params: SamplingParams | None, prompt_tokens: int, defaults: SamplingDefaults | None = None
    ) -> SamplingParams:
        """The parameters of an answer, completed by `defaults`; defaults None: the model's, see
        SamplingDefaults.of_conversations. params None: the answer may fill the context."""
        if params is None:
            params = SamplingParams(max_tokens=max(self.room(prompt_tokens), 1))
        return params.resolve(defaults or self._manifest.sampling.of_conversations())

    def compiled(self, grammar: str) -> Constrain | None:
        """Compile the grammar of a query; None if there is none. RequestError if the engine cannot follow grammars,
        MissingExtraError if the library that compiles them is missing."""
        if not grammar:
            return None
        if self.grammars is None:
            raise RequestError(
                "this engine cannot follow a grammar: it has no tokenizer or no end token", field="response_format"
            )
        try:
            return self.grammars.compile(grammar)
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"schemas, regular expressions and grammars need {error.name}, which is not installed",
                install("structured"),
            ) from error


def _bound(query: Query) -> Query:
    """The query; if it has a grammar, with its parameters adapted to that (`SamplingParams.of_a_form`)."""
    return replace_fields(query, params=query.params.of_a_form()) if query.grammar else query


def _source_of(params: SamplingParams) -> str:
    if not params.asks_for_a_form:
        return ""
    from .grammars.sources import of_params

    return of_params(params)
