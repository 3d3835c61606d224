"""The fields of a request that say how it is sampled."""

from __future__ import annotations

from ...requests.params import SamplingParams
from ...watermark.settings import Watermark
from .errors import conflict
from .requests import Common


def sampling(request: Common, max_tokens: int, logprobs: int | None, vocab_size: int) -> SamplingParams:
    """Biases of tokens that the vocabulary does not have change nothing and are left out."""
    stop = request.stop
    biases = {int(token): value for token, value in (request.logit_bias or {}).items()}
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=0 if request.top_k == -1 else request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias={token: value for token, value in biases.items() if token < vocab_size},
        seed=None if request.seed in (None, -1) else request.seed % 2**64,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
        min_tokens=min(request.min_tokens, max_tokens),
        logprobs=logprobs,
        n=request.n,
        include_stop=request.include_stop_str_in_output,
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
    )


def watermark_of(request: Common, served: Watermark | None, n: int) -> Watermark | None:
    """How a request's answers are marked: as the server says, or else as the request does. HttpError 400 where both
    do, and for several answers that the mark would make equal."""
    asked = request.watermark
    if served is not None and asked is not None:
        raise conflict("watermark: this server marks every answer by itself", "watermark")
    found = served if asked is None else Watermark(asked.key, asked.method, asked.ratio, asked.bias)
    if found is not None and found.method == "gumbel" and n > 1:
        raise conflict("n: a gumbel watermark makes all answers to one prompt equal", "n")
    return found


def check_allowed(params: SamplingParams, grammar: str) -> None:
    """HttpError if what may be sampled is said twice, or is nothing."""
    if grammar and (params.bad_words or params.allowed_token_ids is not None):
        name = "bad_words" if params.bad_words else "allowed_token_ids"
        raise conflict(f"{name}: what may come is said by a grammar already", name)
    allowed = params.allowed_token_ids
    if allowed is not None and {(token,) for token in allowed} <= set(params.bad_words):
        raise conflict("bad_words: forbid all allowed_token_ids", "bad_words")
