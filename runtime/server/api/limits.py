"""Every bound of the API in one place: the validator, the OpenAPI document and the tests read these tables."""

from __future__ import annotations

import msgspec

from ...requests.params import BOUNDS, INTEGERS, MAX_BIAS, MAX_BIASES, MAX_STOP_BYTES, MAX_STOP_IDS, MAX_STOPS

# numeric request fields: inclusive bounds; those of sampling parameters come from the runtime
NUMBERS: dict[str, tuple[float, float]] = {
    **BOUNDS,
    "max_completion_tokens": (1, BOUNDS["max_tokens"][1]),
    "top_logprobs": BOUNDS["logprobs"],
    "logit_bias": (-MAX_BIAS, MAX_BIAS),
    "best_of": BOUNDS["n"],
    "prompt_logprobs": BOUNDS["logprobs"],
    "seed": (-(2**63), BOUNDS["seed"][1]),
    "top_k": (-1, BOUNDS["top_k"][1]),
    "truncate_prompt_tokens": (-1, 2**31 - 1),
    "dimensions": (1, 2**31 - 1),
    "top_n": (0, 2**31 - 1),
    "priority": (-100, 100),
    "deadline": (0.001, 86_400.0),
    "num_predict": (-2, BOUNDS["max_tokens"][1]),  # an option of Ollama, as are the next two
    "num_ctx": (1, 2**31 - 1),
    "repeat_last_n": (-1, 2**31 - 1),
}
WHOLE = INTEGERS | {
    "max_completion_tokens", "top_logprobs", "priority", "dimensions", "top_n", "best_of", "prompt_logprobs",
    "truncate_prompt_tokens", "num_predict", "num_ctx", "repeat_last_n",
}  # fmt: skip

# sizes of lists and texts in a request
PROMPTS = 1024
INPUTS = 2048  # of one request for embeddings; OpenAI's limit
STOPS = MAX_STOPS
STOP_CHARS = MAX_STOP_BYTES // 4  # characters, as JSON Schema counts; no character takes more than 4 bytes
STOP_IDS = MAX_STOP_IDS
BIASES = MAX_BIASES
MESSAGES = 512
TOOLS = 128
GRAMMAR_CHARS = 16 << 10
CHOICES = 256
ALLOWED_IDS = 4096
QUESTIONS = 400  # of one request for decisions, as are the next four; OpenAI's limits
OPTIONS = 255
JSON_LEVELS = 32
JSON_VALUES = 10_000
JSON_BYTES = 256 << 10
NAME_CHARS = 64
SPEAKER_CHARS = 256  # characters of a name in a conversation, which another server may have made

# one HTTP request
BODY_BYTES = 2 << 20
UPLOAD_BYTES = 100 << 20
HEADERS = 100
HEADER_BYTES = 60 << 10
HEADER_S = 10.0
BODY_S = 30.0
WRITE_S = 30.0
UNSENT_BYTES = 256 << 10  # of one stream to a client that does not read
STORED_BYTES = 64 << 20  # of stored responses that later requests may continue
SOCKET_STORED_BYTES = 16 << 20  # of responses that a WebSocket keeps for itself
SOCKET_S = 3600.0  # life of a WebSocket, from the specification of Open Responses
CHANGE_S = 60.0  # time for requests to end after SIGHUP, before the engine is loaded again
PEER_S = 5.0  # between two health checks of a server that computes prompts for this one
PEER_ANSWER_S = 10.0  # timeout of such a check
PEER_AVOID_S = 10.0  # how long a server that did not answer gets no prompts
IDLE_S = 75.0  # a kept-alive connection without a request


def bound(name: str, low: float | None = None) -> msgspec.Meta:
    """The bounds of a numeric field, from NUMBERS. low: another lowest value, None for that of the table."""
    least, high = NUMBERS[name]
    low = least if low is None else low
    if name not in WHOLE:
        return msgspec.Meta(ge=low, le=high)
    return msgspec.Meta(ge=int(low), le=min(int(high), 2**63 - 1))
