"""ChatTurn: one answer to be generated: the template's input, and what the answer may and must contain.

The library and the server both make prompts with it; they differ in where a template is rendered and a grammar is
compiled.
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

# inputs of every template, which a variable of the same name would replace
_FIELDS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "template"})


def template_input(
    messages: list[dict[str, Any]],
    form: AnswerFormat,
    tools: Sequence[Mapping[str, Any]] | None,
    options: TemplateOptions,
) -> TemplateInput:
    """The template's input. messages: each with role and content; they may be modified. tools: None if there are none.
    RequestError if the template's format cannot express the messages."""
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
    """One answer. form: how the model writes tool calls and thoughts. grammar: a grammar for the whole answer, a text
    of `grammars.sources`, "" for any text.

    RequestError if tools are shown and icc can read no tool format of the model, or if a call is required together with
    a grammar.
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
        """The prompt, given the rendered text. A thought that the text begins is removed if every token of the answer
        must follow a grammar."""
        if self.grammar or (self.tools.must and not self.form.messages):
            return self.form.without_thought(text)
        return text

    def source(self, special_tokens: Mapping[str, int], end_ids: Sequence[int]) -> str:
        """The grammar that the answer must follow: that of the tool calls if a call is required; "" for any text."""
        if not self.tools.must:
            return self.grammar
        return tool_grammar(self.form, self.tools.schemas, self.tools.most, special_tokens, end_ids)

    def offered_source(self, params: SamplingParams, special_tokens: Mapping[str, int], end_ids: Sequence[int]) -> str:
        """The grammar of an answer that may call a tool that was described in words: it makes calls complete. "" if it
        would conflict with the parameters or with thoughts."""
        form = self.form
        bound = params.ignore_eos or params.min_tokens or params.bad_words or params.allowed_token_ids is not None
        if not form.generic or not self.tools.shown or self.grammar or bound or form.special or form.thinking:
            return ""
        return offered_grammar(form, self.tools.schemas, self.tools.most, special_tokens, end_ids)

    @property
    def is_read(self) -> bool:
        """Whether the answer may contain tool calls, thoughts or other parts besides plain text."""
        form = self.form
        return not self.grammar and bool(self.tools.shown or form.messages or form.thinking is not None)

    @property
    def thinks(self) -> bool:
        """Whether the answer may contain thoughts, which are reported separately."""
        return self.is_read and (self.form.thinking is not None or self.form.messages)

    def reader(self, prompt: str) -> MakeReader | None:
        """A factory of readers for the answers to a prompt (see `prompt`); None if the answers are plain text."""
        if not self.is_read:
            return None
        form, tools, messages = self.form, self.tools, self.given.messages
        last = messages[-1]
        goes_on = self.given.continue_final_message and last["role"] == "assistant"
        thinking = form.thinks_after(prompt, str(last.get("content")) if goes_on else "")
        make_id = maker_of_ids(form, sum(len(message.get("tool_calls") or ()) for message in messages))
        return partial(AnswerReader, form, tools.schemas, tools.most, thinking=thinking, begun=goes_on, make_id=make_id)
