"""Sampling parameters from the fields of a request."""

from __future__ import annotations

from ...requests.params import SamplingParams
from ...watermark.settings import Watermark, one_or_all
from .errors import conflict
from .requests import Common


def sampling(request: Common, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """The sampling parameters of a request. logprobs: how many of the likeliest tokens get log-probabilities, beside
    the sampled one; None: no token does. HttpError 400 for fields that contradict each other."""
    stop = request.stop
    beams = width(request) if request.use_beam_search else 1
    for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(request, name) != default and not request.use_beam_search:
            raise conflict(f"{name}: is for beam search only: give use_beam_search", name)
    if request.use_beam_search and request.temperature:
        raise conflict("temperature: a beam search does not sample: leave it out, or give 0", "temperature")
    searched = {"length_penalty": request.length_penalty, "early_stopping": request.early_stopping}
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if request.use_beam_search and request.temperature is None else request.temperature,
        top_p=request.top_p,
        top_k=0 if request.top_k == -1 else request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias={int(token): value for token, value in (request.logit_bias or {}).items()},
        seed=None if request.seed in (None, -1) else request.seed % 2**64,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
        min_tokens=min(request.min_tokens, max_tokens),
        logprobs=logprobs,
        n=request.n if request.use_beam_search else width(request),
        beams=beams,
        **(searched if beams > 1 else {}),
        include_stop=request.include_stop_str_in_output,
        speculative=request.speculative,
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
    )


def width(request: Common) -> int:
    """How many completions a prompt gets before the best are chosen; for beam search, the number of beams."""
    return request.best_of or request.n


def check_best(request: Common) -> None:
    """HttpError if best_of is less than n, or if the best are to be streamed before they are known."""
    if width(request) < request.n:
        raise conflict(f"best_of = {request.best_of}: must be at least n = {request.n}", "best_of")
    if width(request) > request.n and request.stream and not request.use_beam_search:
        raise conflict("best_of: the best are known at the end, not in a stream", "best_of")


def watermark_of(request: Common, served: Watermark | None) -> Watermark | None:
    """The watermark of a request's answers: the server's, or else the request's; None: no watermark. HttpError 400 if
    both have one, for several answers that the mark would make equal, and for beam search, which does not sample."""
    asked = request.watermark
    if served is not None and asked is not None:
        raise conflict("watermark: this server marks every answer by itself", "watermark")
    found = served
    if asked is not None:
        if asked.method != "synthid" and isinstance(asked.key, list) and len(asked.key) > 1:
            raise conflict(f"watermark: key: {asked.method} takes one, not several", "watermark")
        found = Watermark(one_or_all(asked.key), asked.method, asked.ratio, asked.bias, asked.alpha)
    if found is not None and request.use_beam_search:
        raise conflict("watermark: needs sampling, and beam search does not sample", "watermark")
    if found is not None and found.method == "gumbel" and width(request) > 1:
        raise conflict("n: a gumbel watermark makes all answers to one prompt equal", "n")
    return found


def check_allowed(params: SamplingParams, grammar: str) -> None:
    """HttpError if a grammar and another field restrict the tokens, or if no token may be sampled."""
    if grammar and (params.bad_words or params.allowed_token_ids is not None):
        name = "bad_words" if params.bad_words else "allowed_token_ids"
        raise conflict(f"{name}: a grammar already restricts the tokens", name)
    allowed = params.allowed_token_ids
    if allowed is not None and {(token,) for token in allowed} <= set(params.bad_words):
        raise conflict("bad_words: forbid all allowed_token_ids", "bad_words")
