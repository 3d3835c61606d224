"""Prompting: from what a caller gives (a text, token ids, a conversation) to what the engine loop takes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import index
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, cast

import msgspec

from .batch.scheduled import NO_EXTRAS, Extras
from .errors import MissingExtraError, RequestError, install
from .format.load import Engine
from .format.manifest import Manifest, SamplingDefaults
from .requests.params import SamplingParams
from .templates.messages import Messages, is_messages, prepared
from .templates.source import TemplateSource, read_template
from .tokenizer import Tokenizer

if TYPE_CHECKING:  # a text that is completed as it is needs none of these
    from .embed_prompts import EmbedOptions
    from .grammars.constraints import Grammars
    from .reading.answer import MakeReader
    from .reading.formats import AnswerFormat
    from .reading.tools import ToolChoice, Tools
    from .requests.sampler import Constrain
    from .templates.template import ChatTemplate

Prompt = str | Sequence[int]


class RenderOptions(TypedDict, total=False):
    """How a conversation becomes a text. tools: what the model may call, as in OpenAI's API. add_generation_prompt:
    the answer begins behind the last message (default); continue_final_message: it goes on with the last message
    instead. chat_template: one of several templates by its name, such as "rag" (else "tool_use" is taken where there
    are tools, or "default"). chat_template_kwargs: more variables of the template, such as enable_thinking. documents:
    what a template for retrieval shows the model."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class ChatOptions(RenderOptions, total=False):
    """How a conversation is answered: see RenderOptions; tool_choice: "auto" (default), "none", "required", or the
    tool that must be called, by its name or as in OpenAI's API; parallel_tool_calls: whether several may be."""

    tool_choice: ToolChoice | None
    parallel_tool_calls: bool


class Encoded(NamedTuple):
    """A text, or a pair of texts, that is to be read: its token ids, how many of the first are not pooled, and what
    else the model is told of each token."""

    token_ids: Sequence[int]
    skipped: int = 0
    extras: Extras = NO_EXTRAS


class Query(msgspec.Struct, frozen=True):
    """A prompt, ready for the engine loop. grammar: what the answer must follow besides what `params` say, a text of
    `grammars.sources`. read: makes a reader of the answer, where that may hold more than words."""

    token_ids: Sequence[int]
    params: SamplingParams
    grammar: str = ""
    read: MakeReader | None = None


class Prompting:
    """What an engine has to make prompts and parameters with: tokenizer, chat template, grammars. RequestError for what
    a caller has wrong.

    template: where the chat template stands; of an engine, in its files. May be used by several threads.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        engine: Engine | None = None,
        template: TemplateSource | None = None,
    ) -> None:
        self._manifest, self._tokenizer, self._engine = manifest, tokenizer, engine
        self._compiling = Lock()
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
        """How the model writes calls and thoughts, as its template tells."""
        from .reading.formats import AnswerFormat
        from .reading.probe import find_format, now

        if self.template is None:
            return AnswerFormat()
        special_tokens = {} if self._tokenizer is None else self._tokenizer.special_tokens
        return now(find_format(self.source.all_texts, self._rendered, special_tokens))

    async def _rendered(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, prompt: bool) -> str:
        assert self.template is not None
        return self._render(messages, tools, prompt, False, None, {})

    def use_template(self, given: str) -> None:
        """Take a chat template instead of the engine's own, or one of its own by its name; see
        `TemplateSource.replaced`. TemplateRefused or MissingExtraError if it cannot be used."""
        self.source = self.source.replaced(given)
        self.template = self.source.open()
        self.__dict__.pop("form", None)

    @cached_property
    def grammars(self) -> Grammars | None:
        """Compiles grammars; None for an engine without tokenizer or end token, which cannot follow any."""
        end_ids = self._manifest.model.eos_token_ids
        if self._tokenizer is None or not end_ids:
            return None
        from .grammars.constraints import Grammars

        return Grammars(self._tokenizer.to_json(), self._manifest.model.vocab_size, end_ids)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text through the tokenizer with its special tokens, token ids as they are."""
        if isinstance(prompt, str):
            return self._text_tokenizer.encode(prompt)
        try:
            return list(map(index, prompt))
        except TypeError as error:
            hint = "a prompt is a text or a list of integers; generate takes a list of prompts"
            raise RequestError(f"the prompt is not token ids: {error}", hint, field="prompt") from error

    def encode_embedded(self, text: Prompt, options: EmbedOptions) -> Encoded:
        """A text that is to be embedded; see EmbedOptions."""
        from .embed_prompts import cut, encode_prompted

        if isinstance(text, str):
            return Encoded(*encode_prompted(self._text_tokenizer, self._manifest, text, options))
        return Encoded(cut(self.encode(text), self._manifest, options))

    def encode_pair(self, query: str, document: str, longest: int | None = None) -> Encoded:
        """A query and a document, with the type of each token if the model takes any (see EmbeddingFacts); see
        Tokenizer.encode_pair."""
        if not isinstance(query, str) or not isinstance(document, str):
            raise RequestError("query and documents must be texts", field="documents")
        facts = self._manifest.embedding
        if facts is not None and facts.around:
            return Encoded(self._text_tokenizer.encode_between(facts.around, (query, document), longest))
        ids, types = self._text_tokenizer.encode_pair(query, document, longest)
        if facts is not None and facts.types_input:
            return Encoded(ids, extras={facts.types_input: array("i", types).tobytes()})
        if facts is not None and facts.coded_types:
            size = self._manifest.model.vocab_size
            return Encoded([token + size * kind for token, kind in zip(ids, types, strict=True)])
        return Encoded(ids)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation in the engine's chat template; see RenderOptions."""
        if self.template is None:
            raise RequestError("the engine has no chat template", "complete a text as it is (--raw)", field="messages")
        from .reading.history import fitted

        given = fitted(prepared(messages), self.form)
        self.source.check(chat_template)
        variables = {**({"documents": documents} if documents else {}), **(chat_template_kwargs or {})}
        return self._render(given, tools, add_generation_prompt, continue_final_message, chat_template, variables)

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        prompt: bool,
        goes_on: bool,
        name: str | None,
        variables: Mapping[str, Any],
    ) -> str:
        assert self.template is not None
        try:
            return self.template.render(messages, tools, prompt, goes_on, name, **variables)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            message = f"the chat template cannot use these messages: {error}"
            raise RequestError(message, field="messages") from error

    def encode_chat(self, messages: Messages, **options: Unpack[RenderOptions]) -> list[int]:
        """Token ids of a conversation. The template has written its special tokens itself."""
        return self._encode_rendered(self.render(messages, **options))

    def _encode_rendered(self, text: str) -> list[int]:
        return self._text_tokenizer.encode(text, add_special_tokens=False)

    # -- queries -----------------------------------------------------------------------------------------------------

    def queries(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Query]:
        """Every prompt with its parameters."""
        given = params_for(len(prompts), params)
        return [Query(self.encode(prompt), one) for prompt, one in zip(prompts, given, strict=True)]

    def query(self, prompt: Prompt | Messages, params: SamplingParams | None, options: ChatOptions) -> Query:
        """A prompt, or messages, with the defaults that hold for either."""
        if is_messages(prompt):
            return self._chat(prompt, params, options)
        if options:
            raise RequestError(f"{', '.join(options)}: for messages only", "give a list of messages", field="messages")
        return Query(self.encode(cast(Prompt, prompt)), params or SamplingParams())

    def chats(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: ChatOptions,
    ) -> list[Query]:
        """Every conversation with its parameters."""
        given = [None] * len(conversations) if params is None else params_for(len(conversations), params)
        return [self._chat(messages, one, options) for messages, one in zip(conversations, given, strict=True)]

    def _chat(self, messages: Messages, params: SamplingParams | None, options: ChatOptions) -> Query:
        from .reading.tools import offered

        chosen = {name: value for name, value in options.items() if name in RenderOptions.__annotations__}
        tools = offered(
            options.get("tools"), options.get("tool_choice"), options.get("parallel_tool_calls") is not False
        )
        rendering = cast(RenderOptions, {**chosen, "tools": tools.shown or None})
        form, constrained = self.form, tools.must or (params is not None and params.asks_for_a_form)
        text = self.render(messages, **rendering)
        if tools.shown and form.calls is None:
            raise RequestError("this model's chat template has no tool format that icc can read", field="tools")
        if constrained and not (tools.must and form.messages):
            text = form.without_thought(text)
        read = None if constrained and not tools.must else self._reader(messages, tools, text, options)
        token_ids = self._encode_rendered(text)
        resolved = self.chat_params(params, len(token_ids))
        if read is not None and form.special:
            resolved = replace(resolved, skip_special_tokens=False)
        return Query(token_ids, resolved, self._call_grammar(tools, resolved) if tools.must else "", read)

    def _call_grammar(self, tools: Tools, params: SamplingParams) -> str:
        """What an answer follows that must call a tool."""
        if params.asks_for_a_form:
            raise RequestError("tool_choice: a call cannot follow a schema or a grammar too", field="tool_choice")
        from .reading.forced import tool_grammar

        special_tokens = {} if self._tokenizer is None else self._tokenizer.special_tokens
        end_ids = self._manifest.model.eos_token_ids
        return tool_grammar(self.form, tools.schemas, tools.most, special_tokens, end_ids)

    def _reader(self, messages: Messages, tools: Tools, text: str, options: ChatOptions) -> MakeReader | None:
        """Makes readers of the answers, if they may hold more than words."""
        form, last = self.form, messages[-1]
        if not (tools.shown or form.messages or form.thinking is not None):
            return None
        from .reading.ids import maker_of_ids
        from .reading.reader import AnswerReader

        goes_on = bool(options.get("continue_final_message")) and last["role"] == "assistant"
        thinking = form.thinks_after(text, str(last.get("content")) if goes_on else "")
        make_id = maker_of_ids(form, sum(len(message.get("tool_calls") or ()) for message in messages))
        return partial(AnswerReader, form, tools.schemas, tools.most, thinking=thinking, begun=goes_on, make_id=make_id)

    @property
    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("the engine has no tokenizer", "give token ids instead of text", field="prompt")
        return self._tokenizer

    # -- parameters --------------------------------------------------------------------------------------------------

    def chat_params(
        self, params: SamplingParams | None, prompt_tokens: int, defaults: SamplingDefaults | None = None
    ) -> SamplingParams:
        """The parameters of an answer: what they leave out is the model's, see SamplingDefaults.of_conversations, or
        what `defaults` say. Without any, the answer may fill the context."""
        if params is None:
            params = SamplingParams(max_tokens=max(self._manifest.limits.max_seq_len - prompt_tokens, 1))
        return params.resolve(defaults or self._manifest.sampling.of_conversations())

    def constrained(self, params: SamplingParams, grammar: str = "") -> tuple[SamplingParams, Constrain | None]:
        """The parameters, and the grammar that they or the caller ask for, compiled."""
        if not params.asks_for_a_form and not grammar:
            return params, None
        if self.grammars is None:
            raise RequestError(
                "this engine cannot follow a grammar: it has no tokenizer or no end token", field="response_format"
            )
        try:
            with self._compiling:
                constrain = self.grammars.compile(grammar or _source(params))
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"schemas, regular expressions and grammars need {error.name}, which is not installed",
                install("structured"),
            ) from error
        return params.of_a_form(), constrain


def _source(params: SamplingParams) -> str:
    """What the text must be."""
    from .grammars.sources import of_lark, of_regex, of_schema

    try:
        if params.json_schema is not None:
            return of_schema(dict(cast("Mapping[str, Any]", params.json_schema)))
    except (TypeError, ValueError) as error:
        raise RequestError(f"json_schema is not JSON: {error}", field="json_schema") from error
    return of_regex(params.regex) if params.regex is not None else of_lark(params.grammar or "")


def params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """One SamplingParams per prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} params", field="params")
    return list(params)
