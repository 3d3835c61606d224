"""`icc compile --prefix`: finds the tokens that prompts begin with, and their KV, computed by the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runtime.errors import MissingIsaError, RequestError
from ...runtime.format.manifest import Limits, Manifest, ModelFacts, QuantFacts, SamplingDefaults
from ...runtime.format.prompts import PROMPTS_DIR, CompiledPrompt, CompiledPrompts
from ...runtime.kv.sequence import CachedSequence
from ...runtime.llm import LLM
from ...runtime.loading import open_llm
from ...runtime.options import LoadOptions
from ...runtime.prefixes.beginning import common_length
from ...runtime.prefixes.blocks import KVBlocks, digest_of, in_reach
from ...runtime.prompting import Prompting
from ...runtime.requests.params import SamplingParams
from ...runtime.templates.source import TemplateSource, read_template
from ...runtime.tokenizer import Tokenizer
from ..errors import UsageError
from ..prompt_files import PromptFile, PromptTokens

Messages = list[dict[str, Any]]
# Texts that begin with different characters and tokens: the common beginning of prompts whose users say these is the
# common beginning of all prompts.
_SAID = ("Hello, what is this?", "7 + 35 = ?", "\n\u00e9t\u00e9")
_OTHER_DAY = "1 Jan 1999"
_GUESSED = 3  # tokens to generate, so that drafters guess, too


def read_prompts(files: Sequence[PromptFile], texts: Path) -> list[PromptTokens]:
    """The tokens that prompts begin with, for a model whose tokenizer and template are in the directory `texts`.
    UsageError if a file cannot be the beginning of prompts."""
    tokenizer = Tokenizer((texts / "tokenizer.json").read_bytes())
    names = [path.relative_to(texts).as_posix() for path in sorted(texts.rglob("*.jinja"))]
    source = read_template(lambda name: _content(texts / name), names)
    prompting = Prompting(_UNKNOWN, tokenizer, template=source)
    return [_tokens(file, prompting, source, tokenizer) for file in files]


# A placeholder manifest to render prompts before there is an engine: only tokenizer and template matter.
_UNKNOWN = Manifest(
    format_version=0, icc_version="", target="", backend="", model=ModelFacts("", 0, 0, 0, 0, 0, None, [], None),
    quantization=QuantFacts("none", 0.0, []), limits=Limits(0, 0, 0), sampling=SamplingDefaults(), programs={},
    tokenizer_dir=None, files={},
)  # fmt: skip


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _tokens(file: PromptFile, prompting: Prompting, source: TemplateSource, tokenizer: Tokenizer) -> PromptTokens:
    name = file.path.name
    if file.messages is None and not source:
        ids = [tokenizer.encode(file.text + said) for said in ("", *_SAID)]
        return PromptTokens(name, "text", _beginning(ids))
    if not source:
        raise UsageError(f"{file.option}: the model has no chat template for messages", "give a text")
    messages = file.messages or [{"role": "system", "content": file.text}]
    begun = [_rendered(file, prompting, said) for said in _first_turns(messages)]
    begun.append(_rendered(file, prompting, _first_turns(messages)[0], _OTHER_DAY))
    if not _holds(_beginning_of(begun), messages):
        same_day = _holds(_beginning_of(begun[:-1]), messages)
        why = "writes the date in front of it" if same_day else "has it behind or within what users say"
        raise UsageError(
            f"{file.option}: the chat template {why}, so that no two prompts need begin with it",
            "leave it out, or compile a checkpoint whose template has it in front",
        )
    later, warning = [_rendered(file, prompting, said) for said in _later_turns(messages)], ""
    if _holds(_beginning_of([*begun, *later]), messages):
        begun += later
    else:
        warning = f"{file.option}: the chat template moves it in later turns; first turns alone begin with it"
    begun.append(_beginning_of(begun))  # so that tokens that are equal by chance, such as unknown words, do not count
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in begun]
    return PromptTokens(name, "messages" if file.messages else "system", _beginning(ids), warning)


def _beginning(ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(ids[0][: common_length(ids)])


def _beginning_of(texts: Sequence[str]) -> str:
    return texts[0][: common_length(texts)]


def _first_turns(messages: Messages) -> list[Messages]:
    """Conversations that begin with these messages."""
    if messages[-1]["role"] == "user":
        return [messages, *([*messages, _said("assistant", "Yes."), _said("user", said)] for said in _SAID)]
    return [[*messages, _said("user", said)] for said in _SAID]


def _later_turns(messages: Messages) -> list[Messages]:
    return [[*turn, _said("assistant", "Yes."), _said("user", _SAID[0])] for turn in _first_turns(messages)[:1]]


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _rendered(file: PromptFile, prompting: Prompting, messages: Messages, day: str = "") -> str:
    variables = {"strftime_now": lambda form: day} if day else {}
    try:
        return prompting.render([dict(message) for message in messages], chat_template_kwargs=variables)
    except RequestError as error:
        hint = "give the messages that it takes, in a file that ends in .json"
        raise UsageError(f"{file.option}: {error.message}", hint) from error


def _holds(text: str, messages: Messages) -> bool:
    """Whether a text contains the contents of all messages."""
    return all(message["content"].strip() in text for message in messages)


def compute_prompts(stage: Path, prompts: Sequence[CompiledPrompt]) -> CompiledPrompts | None:
    """The KV of prompts, computed by the engine in `stage` and written into it. None if this machine cannot run it, or
    if the host cannot read its cache."""
    try:
        llm = open_llm(LoadOptions(stage, verify=False))
    except MissingIsaError:
        return None
    with llm:
        reach = in_reach(llm.executor)
        if reach is None or llm.engine is None or llm.engine.library is None:
            return None
        (stage / PROMPTS_DIR).mkdir()
        blocks = KVBlocks(digest_of(llm.manifest), reach)
        found = [_computed(llm, blocks, stage, number, prompt) for number, prompt in enumerate(prompts)]
        return CompiledPrompts(found, blocks.identity.hex(), llm.engine.library.title)


def _computed(llm: LLM, blocks: KVBlocks, stage: Path, number: int, prompt: CompiledPrompt) -> CompiledPrompt:
    tokens, room = prompt.tokens[: prompt.length], llm.manifest.limits.max_seq_len - prompt.length
    if llm.loop.speculator is not None:  # the KV includes that of a draft layer, which must read these tokens, too
        llm.loop.speculator.adaptive = False
    llm.generate([tokens], SamplingParams(max_tokens=min(_GUESSED, room), temperature=0, ignore_eos=True))
    found = llm.loop.scheduler.kv.found(CachedSequence(tokens=tokens), prompt.length)
    assert found is not None, "the prompt was computed just now"
    name = f"{PROMPTS_DIR}/{number}.kv"
    with (stage / name).open("wb") as file:
        for view in blocks.read(found):
            file.write(view)
    numbers = [sorted(held) for held in found]
    return CompiledPrompt(prompt.source, prompt.kind, prompt.tokens, prompt.length, name, numbers)
