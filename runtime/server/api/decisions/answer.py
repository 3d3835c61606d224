"""The answers of /v1/decisions: the model's probability of each label, without generated text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from ....query import Query
from ....requests.params import SamplingParams
from ...engine.admission import Price
from ...engine.engine_stream import EngineFailed
from ..decoding import converted
from ..errors import HttpError
from ..generate import Generator
from ..jobs import Job, Jobs
from ..requests import ChatRequest
from .labels import labels_behind
from .request import ChoiceQuestion, DecisionRequest, PredicateQuestion, Question
from .wording import LAST_WORDS, Worded, conversation, plain, worded

_MARK = "icc-question-f1b7a0c2"  # placeholder of the question when the template is rendered
_TAIL = 64  # characters before an answer on which its tokens may depend
_PLAIN_END = "\nAnswer:"


class PredicateAnswer(Struct, tag_field="type", tag="predicate"):
    """The probability that the statement is true. label_mass: the probability of all labels together, among all
    tokens."""

    probability: float
    label_mass: float
    name: str | None = None


class ChoiceProbability(Struct):
    """How likely a choice is among the choices."""

    value: str | bool
    probability: float


class ChoiceAnswer(Struct, tag_field="type", tag="choice"):
    """The likeliest choice; confidence: its probability. label_mass: as of a predicate."""

    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]
    label_mass: float
    name: str | None = None


class LevelProbability(Struct):
    """How likely a level is among the levels; value: its place, from 0."""

    label: str
    value: int
    probability: float


class ScoreAnswer(Struct, tag_field="type", tag="score"):
    """The mean of the levels' values; confidence: the probability of the likeliest. label_mass: as of a predicate."""

    score: float
    confidence: float
    probabilities: list[LevelProbability]
    label_mass: float
    name: str | None = None


class DecisionInputDetails(Struct):
    """How many of the prompts' tokens were in the prefix cache, and how many were not."""

    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(Struct):
    """Always 0: there are no thoughts."""

    reasoning_tokens: Literal[0] = 0


class DecisionUsage(Struct):
    """Tokens of the prompts, one for each question."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    total_tokens: int
    output_tokens: Literal[0] = 0
    output_tokens_details: DecisionOutputDetails = msgspec.field(default_factory=DecisionOutputDetails)


class Decision(Struct):
    """Answer of /v1/decisions: one for each question, in their order."""

    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    model: str
    usage: DecisionUsage


async def decision_jobs(jobs: Jobs, request: DecisionRequest, client: str) -> list[Job]:
    """The jobs of a request: one for its first question, then one for the others, which find the input in the prefix
    cache and are priced without it. HttpError or RequestError for a client's mistake."""
    shared, prompts = await _prompts(jobs, request)
    queries = []
    for tokens, labels in prompts:
        jobs.prompts.check_length(len(tokens), "input", generates=True)
        queries.append(
            Query(tokens, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0, score_ids=labels))
        )
    submits, deadline = await jobs.sent(queries, request, client, jobs.salt(client, request.prompt_cache_key))
    most = max(len(labels) for _, labels in prompts)
    parts = [(submits[:1], 0), (submits[1:], shared)]
    return [
        Job(part, Price.of_embeddings([max(len(one.prompt) - known, 1) for one in part], most), deadline)
        for part, known in parts
        if part
    ]


async def _prompts(jobs: Jobs, request: DecisionRequest) -> tuple[int, list[tuple[list[int], tuple[int, ...]]]]:
    """The number of tokens before the questions; for each question, the token ids of its prompt and of its labels."""
    tokenizer = jobs.model.tokenizer
    if tokenizer is None:
        raise HttpError(404, "the engine has no tokenizer, and takes no texts", code="unsupported")
    messages, has_template = conversation(request), bool(jobs.model.template)
    if has_template:
        before, after = await _framed(jobs, request.model, messages)
    else:
        before, after = f"{plain(messages)}\n\n", _PLAIN_END
    labels = labels_behind(tokenizer, (LAST_WORDS + after)[-_TAIL:], not has_template)
    after += labels.end
    asked: list[Worded] = [worded(question, labels) for question in request.questions]
    encode = jobs.prompts.encode
    shared = len(await encode(before, not has_template))
    return shared, [(await encode(before + text + after, not has_template), found) for text, found in asked]


async def _framed(jobs: Jobs, model: str, messages: list[dict]) -> tuple[str, str]:
    """The rendered chat template before and after a question."""
    last = messages[-1]
    if last["role"] == "user":  # many templates refuse two user messages in a row
        last["content"] = f"{last['content']}\n\n{_MARK}"
    else:
        messages.append({"role": "user", "content": _MARK})
    text = await jobs.rendered(converted({"model": model, "messages": messages}, ChatRequest))
    before, mark, after = jobs.model.prompting.form.without_thought(text).rpartition(_MARK)
    if not mark:
        raise HttpError(404, "the model's chat template does not show what a user says last", code="unsupported")
    return before, after


async def decided(generator: Generator, jobs: Sequence[Job], request: DecisionRequest) -> bytes:
    """The answer in JSON. HttpError 504 if the deadline came first; EngineFailed if the model failed."""
    scores: list[list[float]] = []
    cached = 0
    for job in jobs:
        found: dict[int, list[float]] = {}
        with generator.started(job) as run:
            async for deltas in run.deltas():
                for delta in deltas:
                    cached += delta.cached or 0
                    if delta.reason == "error":
                        raise EngineFailed(500, "the model failed on this request: its logits are not numbers")
                    if delta.logprobs:
                        found[delta.id] = [logprob for _, logprob in delta.logprobs[0].top]
            if "deadline" in run.reasons:
                raise HttpError(504, "the deadline has passed", code="deadline")
        scores += [found[number] for number in sorted(found)]
    answers = [_answer(question, one) for question, one in zip(request.questions, scores, strict=True)]
    total = sum(job.prompt_tokens for job in jobs)
    usage = DecisionUsage(total, DecisionInputDetails(cached, total - cached), total)
    return msgspec.json.encode(Decision(answers, request.model, usage))


def _answer(question: Question, logprobs: list[float]) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    """The answer to a question from the log-probabilities of its labels, in their order."""
    largest = max(logprobs)
    weights = [math.exp(one - largest) for one in logprobs]
    shares = [weight / math.fsum(weights) for weight in weights]
    mass = min(math.fsum(map(math.exp, logprobs)), 1.0)
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(shares[0], mass, question.name)
    best = max(range(len(shares)), key=shares.__getitem__)
    if isinstance(question, ChoiceQuestion):
        values = [option.value for option in question.choices]
        listed = [ChoiceProbability(value, share) for value, share in zip(values, shares, strict=True)]
        return ChoiceAnswer(values[best], shares[best], listed, mass, question.name)
    levels = [
        LevelProbability(level.label, value, share)
        for value, (level, share) in enumerate(zip(question.levels, shares, strict=True))
    ]
    mean = math.fsum(level.value * level.probability for level in levels)
    return ScoreAnswer(mean, shares[best], levels, mass, question.name)
