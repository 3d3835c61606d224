"""Prompting: from what a caller gives (a text, token ids, a conversation) to what the engine loop takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import index
from threading import Lock
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from .errors import MissingExtraError, RequestError, install
from .format.load import Engine
from .format.manifest import Manifest
from .grammars.constraints import Grammars
from .grammars.sources import of_lark, of_regex, of_schema
from .requests.params import SamplingParams
from .requests.sampler import Constrain
from .templates.messages import Messages, is_messages, prepared
from .templates.source import TemplateSource, read_template
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .templates.template import ChatTemplate

Prompt = str | Sequence[int]


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt. tools: what the model may call, as in OpenAI's API. add_generation_prompt:
    the answer begins behind the last message (default); continue_final_message: it goes on with the last message
    instead. chat_template_kwargs: more variables of the template, such as enable_thinking."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


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
        return TemplateSource("", {}) if self._engine is None else read_template(self._engine.tokenizer_file)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if the engine has none. TemplateRefused or MissingExtraError if it cannot be used."""
        return self.source.open()

    def use_template(self, text: str) -> None:
        """Take a chat template instead of the engine's own. TemplateRefused or MissingExtraError if it cannot be
        used."""
        self.source = TemplateSource(text, self.source.special_tokens)
        self.template = self.source.open()

    @cached_property
    def grammars(self) -> Grammars | None:
        """Compiles grammars; None for an engine without tokenizer or end token, which cannot follow any."""
        end_ids = self._manifest.model.eos_token_ids
        if self._tokenizer is None or not end_ids:
            return None
        return Grammars(self._tokenizer.to_json(), self._manifest.model.vocab_size, end_ids)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text through the tokenizer with its special tokens, token ids as they are."""
        if isinstance(prompt, str):
            return self._text_tokenizer.encode(prompt)
        try:
            return [index(token) for token in prompt]
        except TypeError as error:
            hint = "a prompt is a text or a list of integers; generate takes a list of prompts"
            raise RequestError(f"the prompt is not token ids: {error}", hint, field="prompt") from error

    def encode_pair(self, query: str, document: str, longest: int | None = None) -> list[int]:
        """Token ids of a query and a document, each with its type (see EmbeddingFacts); see Tokenizer.encode_pair."""
        if not isinstance(query, str) or not isinstance(document, str):
            raise RequestError("query and documents must be texts", field="documents")
        ids, types = self._text_tokenizer.encode_pair(query, document, longest)
        facts = self._manifest.embedding
        count = facts.token_types if facts is not None else 0
        return (
            [i + self._manifest.model.vocab_size * kind for i, kind in zip(ids, types, strict=True)] if count else ids
        )

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation in the engine's chat template; see ChatOptions."""
        if self.template is None:
            raise RequestError("the engine has no chat template", "complete a text as it is (--raw)", field="messages")
        given = prepared(messages)
        try:
            return self.template.render(
                given, tools, add_generation_prompt, continue_final_message, **(chat_template_kwargs or {})
            )
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            message = f"the chat template cannot use these messages: {error}"
            raise RequestError(message, field="messages") from error

    def encode_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids of a conversation. The template has written its special tokens itself."""
        return self._text_tokenizer.encode(self.render(messages, **options), add_special_tokens=False)

    def prepare(
        self, prompt: Prompt | Messages, params: SamplingParams | None, options: ChatOptions
    ) -> tuple[list[int], SamplingParams]:
        """The token ids of a prompt or of messages, and the parameters with the defaults that hold for either."""
        if is_messages(prompt):
            encoded = self.encode_chat(prompt, **options)
            return encoded, self.chat_params(params, len(encoded))
        if options:
            raise RequestError(f"{', '.join(options)}: for messages only", "give a list of messages", field="messages")
        return self.encode(cast(Prompt, prompt)), params or SamplingParams()

    def prepare_chats(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: ChatOptions,
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        """Token ids and parameters of every conversation."""
        encoded = [self.encode_chat(messages, **options) for messages in conversations]
        if params is None:
            return encoded, [self.chat_params(None, len(token_ids)) for token_ids in encoded]
        given = params_for(len(encoded), params)
        return encoded, [self.chat_params(one, len(ids)) for one, ids in zip(given, encoded, strict=True)]

    @property
    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("the engine has no tokenizer", "give token ids instead of text", field="prompt")
        return self._tokenizer

    # -- parameters --------------------------------------------------------------------------------------------------

    def chat_params(self, params: SamplingParams | None, prompt_tokens: int) -> SamplingParams:
        """The parameters of an answer: what they leave out is the model's, see SamplingDefaults.of_conversations.
        Without any, the answer may fill the context."""
        if params is None:
            params = SamplingParams(max_tokens=max(self._manifest.limits.max_seq_len - prompt_tokens, 1))
        return params.resolve(self._manifest.sampling.of_conversations())

    def constrained(self, params: SamplingParams) -> tuple[SamplingParams, Constrain | None]:
        """The parameters, and the grammar that they ask for, compiled."""
        if not params.asks_for_a_form:
            return params, None
        if self.grammars is None:
            raise RequestError(
                "this engine cannot follow a grammar: it has no tokenizer or no end token", field="response_format"
            )
        try:
            with self._compiling:
                constrain = self.grammars.compile(_source(params))
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"schemas, regular expressions and grammars need {error.name}, which is not installed",
                install("structured"),
            ) from error
        # the grammar says itself where a text may end
        return replace(params, ignore_eos=False, min_tokens=0), constrain


def _source(params: SamplingParams) -> str:
    """What the text must be."""
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
