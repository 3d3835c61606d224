"""`run`: one completion, streamed to a text stream, with its timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ..llm import LLM
    from ..requests.generation import Completion
    from ..requests.params import SamplingParams
    from ..requests.request import Output


class RunResult(msgspec.Struct, frozen=True):
    """A completion and how fast it came. Rates in tokens per second; the first token counts as prefill."""

    completion: Completion
    ttft_s: float
    prompt_tokens_per_s: float
    decode_tokens_per_s: float


def run_prompt(llm: LLM, token_ids: Sequence[int], params: SamplingParams, show: Callable[[str], object]) -> RunResult:
    """Generate one completion; `show` gets each chunk of text (token ids without a tokenizer) as it comes."""
    task, generation = llm.begin(llm.prompting.completion(token_ids, params))
    try:
        while generation.finish_reason is None:
            llm.driver.step()
            while generation.outputs:
                show(_text(llm, generation.outputs.popleft()))
    finally:
        llm.driver.abort(task)
    return timed(generation.completion())


def timed(completion: Completion) -> RunResult:
    """A completion with its rates, computed from its times."""
    timing = completion.timing
    decode_s = timing.total - timing.ttft
    count = len(completion.token_ids)
    return RunResult(
        completion,
        timing.ttft,
        len(completion.prompt_token_ids) / timing.ttft if timing.ttft > 0 else 0.0,
        (count - 1) / decode_s if count > 1 and decode_s > 0 else 0.0,
    )


def _text(llm: LLM, output: Output) -> str:
    if llm.tokenizer is not None or output.token_id is None:
        return output.text
    return f"{output.token_id} "


def as_json(result: RunResult, load_s: float) -> dict[str, object]:
    """What `run --json` prints."""
    completion = result.completion
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(completion.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        **({} if completion.score is None else {"score": completion.score}),
        "load_s": round(load_s, 4),
        "ttft_ms": round(result.ttft_s * 1e3, 3),
        "prompt_tokens_per_s": round(result.prompt_tokens_per_s, 2),
        "decode_tokens_per_s": round(result.decode_tokens_per_s, 2),
    }
