"""ChatTurn: an answer that a conversation waits for: what its template is given, and what the answer may and must be.

Library and server make their prompts of it; they differ in where a template is rendered and a grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .chat_options import TemplateOptions
from .errors import RequestError
from .reading.answer import MakeReader
from .reading.forced import offered_grammar, tool_grammar
from .reading.formats import AnswerFormat
from .reading.generic import in_words
from .reading.history import fitted
from .reading.ids import maker_of_ids
from .reading.reader import AnswerReader
from .reading.tools import Tools
from .requests.params import SamplingParams
from .templates.template_input import TemplateInput

# what every template is given, which a variable of the same name would take the place of
_FIELDS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "template"})


def template_input(
    messages: list[dict[str, Any]],
    form: AnswerFormat,
    tools: Sequence[Mapping[str, Any]] | None,
    options: TemplateOptions,
) -> TemplateInput:
    """What the template is given. messages: each with role and content; they may be changed. RequestError if they
    cannot be written as the template has them."""
    goes_on = bool(options.get("continue_final_message"))
    documents, more = options.get("documents"), options.get("chat_template_kwargs") or {}
    for name in more:
        if name in _FIELDS:
            raise RequestError(
                f"chat_template_kwargs: {name} is no variable of one template but a field of its own: give it beside",
                field="chat_template_kwargs",
            )
    variables = {**({"documents": documents} if documents else {}), **more}
    begins = not goes_on and options.get("add_generation_prompt", True)
    shown = [dict(tool) for tool in tools] if tools else None
    built = fitted(messages, form)
    if form.generic:
        built, shown = in_words(built, shown, form.system), None
    return TemplateInput(built, shown, begins, goes_on, variables, options.get("chat_template"))


@dataclass(frozen=True)
class ChatTurn:
    """One answer. form: how the model writes what is no plain answer. grammar: what the whole answer must follow, a
    text of `grammars.sources`, "" for any text.

    RequestError if tools are shown that the model has no format for, or a call must follow a grammar besides its own.
    """

    given: TemplateInput
    form: AnswerFormat
    tools: Tools
    grammar: str = ""

    def __post_init__(self) -> None:
        if self.tools.shown and self.form.calls is None:
            raise RequestError("this model's chat template has no tool format that icc can read", field="tools")
        if self.tools.must and self.grammar:
            raise RequestError("tool_choice: a call cannot follow a schema or a grammar too", field="tool_choice")

    def prompt(self, text: str) -> str:
        """The prompt that the rendered text is: without a thought that it begins, where every token of the answer must
        follow a grammar."""
        if self.grammar or (self.tools.must and not self.form.messages):
            return self.form.without_thought(text)
        return text

    def source(self, special_tokens: Mapping[str, int], end_ids: Sequence[int]) -> str:
        """The grammar that the answer must follow, that of a call where one is wanted; "" for any text."""
        if not self.tools.must:
            return self.grammar
        return tool_grammar(self.form, self.tools.schemas, self.tools.most, special_tokens, end_ids)

    def offered_source(self, params: SamplingParams, special_tokens: Mapping[str, int], end_ids: Sequence[int]) -> str:
        """The grammar of an answer that may call a tool which the model was told of in words: calls in it are whole. ""
        where it would forbid what the parameters, or thoughts, need."""
        form = self.form
        bound = params.ignore_eos or params.min_tokens or params.bad_words or params.allowed_token_ids is not None
        if not form.generic or not self.tools.shown or self.grammar or bound or form.special or form.thinking:
            return ""
        return offered_grammar(form, self.tools.schemas, self.tools.most, special_tokens, end_ids)

    @property
    def is_read(self) -> bool:
        """Whether the answer may hold more than words."""
        form = self.form
        return not self.grammar and bool(self.tools.shown or form.messages or form.thinking is not None)

    @property
    def thinks(self) -> bool:
        """Whether the answer may hold thoughts that are read apart."""
        return self.is_read and (self.form.thinking is not None or self.form.messages)

    def reader(self, prompt: str) -> MakeReader | None:
        """Makes readers of the answers to a prompt (see `prompt`); None where they are nothing but words."""
        if not self.is_read:
            return None
        form, tools, messages = self.form, self.tools, self.given.messages
        last = messages[-1]
        goes_on = self.given.continue_final_message and last["role"] == "assistant"
        thinking = form.thinks_after(prompt, str(last.get("content")) if goes_on else "")
        make_id = maker_of_ids(form, sum(len(message.get("tool_calls") or ()) for message in messages))
        return partial(AnswerReader, form, tools.schemas, tools.most, thinking=thinking, begun=goes_on, make_id=make_id)
