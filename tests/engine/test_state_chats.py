"""Chats with engines that keep states, through templates: the tokens that each turn computes, also if a template
removes earlier text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import icc
import pytest
from icc.runtime.llm import LLM
from icc.runtime.requests.generation import Generation
from icc.runtime.templates.source import TemplateSource
from icc.runtime.tokenizer import Tokenizer
from sizes import soak

pytestmark = pytest.mark.slow

NAMES = [
    "qwen3_next-delta_rule",
    *soak("lfm2-short_convolutions", "kimi_linear-decay_per_row", "bamba-state_space", "jamba-selective_scan"),
    *soak("recurrent_gemma-linear_recurrence", "rwkv-shifted_tokens", "xlstm-matrix_memory"),
    *soak("minimax-lightning_attention", "zamba-heads_of_scans"),
]
BLOCK, ANSWER = 32, 6
PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# like Qwen 3's: it removes the thoughts of earlier turns
FORGETS_THOUGHTS = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
# like Llama 3.1's: the date, before the system message
DATED = PLAIN.replace("{% for", "<|im_start|>system\nToday: {{ date_string }}<|im_end|>\n{% for", 1)
SPECIAL = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "system", "user", "assistant"]


def tokenizer() -> Tokenizer:
    """A token per character, and one for each word of the templates: 9 + 96 tokens of a vocabulary of 120."""
    vocab = {word: i for i, word in enumerate([*SPECIAL, "\n", *map(chr, range(32, 127))])}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<pad>"}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    made = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": w, "special": i < 4, **added} for i, w in enumerate(SPECIAL)],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": model,
    }
    return Tokenizer(json.dumps(made).encode())


# characters, so that an answer is encoded to the tokens that were generated
SAID = icc.SamplingParams(
    max_tokens=ANSWER, temperature=0.0, logprobs=0, ignore_eos=True, allowed_token_ids=tuple(range(10, 105))
)


@pytest.fixture(params=NAMES)
def engines(request: pytest.FixtureRequest, compiled: Callable[..., Any]) -> Iterator[Callable[[str], LLM]]:
    """Loads an engine with a template: `engines(template)`, all of the same model."""
    path, opened = compiled(request.param, max_step_tokens=48, max_batch_size=4).engine, []

    def make(template: str) -> LLM:
        loaded = icc.load(path, threads=1)
        opened.append(loaded)
        return LLM(loaded.manifest, loaded.executor, tokenizer(), loaded.engine, template=TemplateSource(template, {}))

    yield make
    for loaded in opened:
        loaded.close()


def answered(llm: LLM, messages: list[dict[str, str]], **values: str) -> tuple[icc.Completion, Generation]:
    """The answer to a conversation, and its request."""
    begun: list[Generation] = []
    add = llm.loop.add
    llm.loop.add = lambda *args, **more: begun.extend(add(*args, **more)) or begun[-1:]  # type: ignore[method-assign]
    try:
        return llm.chat(messages, SAID, chat_template_kwargs=values), begun[0]
    finally:
        llm.loop.add = add  # type: ignore[method-assign]


class Chat:
    """One conversation with an engine; each turn is repeated on an engine with an empty cache."""

    def __init__(self, make: Callable[[str], LLM], template: str, system: str = "") -> None:
        self.llm, self.cold = make(template), make(template)
        self.messages = [{"role": "system", "content": system}] if system else []
        self.before = 0  # number of tokens in the last prompt
        self.prompt = 0

    def turn(self, said: str, thought: str = "", **values: str) -> int:
        """Run a turn; returns how many of the prompt's tokens were cached. Its answer is bit-equal to that of the cold
        engine."""
        self.messages.append({"role": "user", "content": said})
        (answer, request), (expected, first) = (answered(m, self.messages, **values) for m in (self.llm, self.cold))
        self.cold.loop.reset()
        assert first.num_cached_tokens == 0 and answer == expected and request.logprobs == first.logprobs
        assert len(answer.text) == ANSWER
        self.messages.append({"role": "assistant", "content": thought + answer.text})
        self.before, self.prompt = self.prompt, len(request.prompt)
        return request.num_cached_tokens or 0


def test_ten_turns_compute_only_what_is_new(engines: Callable[[str], LLM]) -> None:
    chat = Chat(engines, PLAIN, "Be brief.")
    for number in range(10):
        cached = chat.turn(f"no {number}")
        if number:
            assert cached == (chat.before + ANSWER - 1) // BLOCK * BLOCK


def test_thoughts_that_are_taken_out_cost_one_answer(engines: Callable[[str], LLM]) -> None:
    """The next prompt begins with the whole previous prompt: the tokens of that are not computed again."""
    chat = Chat(engines, FORGETS_THOUGHTS)
    for number in range(10):
        cached = chat.turn(f"no {number}", "<think>well</think>")
        if number:
            assert cached >= chat.before // BLOCK * BLOCK


def test_another_day_in_front_begins_anew(engines: Callable[[str], LLM]) -> None:
    chat = Chat(engines, DATED)
    for number in range(8):
        cached = chat.turn(f"no {number}", date_string="1 Jan" if number < 4 else "2 Jan")
        if number == 4:
            assert cached == 0
        elif number:
            assert cached == (chat.before + ANSWER - 1) // BLOCK * BLOCK
