"""SamplingParams: how one request is sampled; validated at construction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import RequestError, bounds
from ..format.manifest import SAMPLING_BOUNDS
from ..settings import setting
from ..values import json_schema, stops_early
from ..watermark.settings import FORM, Watermark, watermark

if TYPE_CHECKING:
    from ..format.manifest import SamplingDefaults

# inclusive bounds of the numeric fields, for validation and documentation
BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    **SAMPLING_BOUNDS,
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, 20),
    "n": (1, 16),
    "beams": (1, 64),
    "length_penalty": (-10.0, 10.0),
}
_REQUIRED = frozenset(
    {"max_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "n", "beams", "length_penalty"}
)
INTEGERS = frozenset({"max_tokens", "min_tokens", "top_k", "seed", "logprobs", "n", "beams"})
MAX_STOPS = 64
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_ALLOWED = 1 << 17
MAX_SCORED = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request. None means the engine's default; if it has none, greedy or off.

    max_tokens: the most tokens to generate; min_tokens: end and stop tokens are not sampled before so many tokens.
    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: 1 and 0 are off; applied in the order temperature, top_k,
    top_p, min_p. repetition_penalty acts on the tokens of prompt and output, presence_penalty and frequency_penalty on
    those of the output. logit_bias: added to the logits of token ids. seed: the same seed gives the same tokens,
    whatever other requests run; None: a random seed. stop: strings that end the text (and are not part of it);
    stop_token_ids: tokens that end it. ignore_eos: continue after the model's end token. logprobs: how many of the
    likeliest tokens to report per position besides the sampled one; None: report nothing. n: the number of independent
    completions. include_stop: keep the stop string that ended the text. skip_special_tokens: leave special tokens out
    of the text. bad_words: token sequences that are not generated. allowed_token_ids: only these are sampled; None: any
    token. score_ids: with logprobs, the tokens to report at every position instead of the likeliest. watermark: how
    tokens are marked, as Watermark or its text; None: they are not. speculative: False: decode without speculation,
    which changes only the speed.

    beams: 2 or more: beam search instead of sampling; the results are the `n` best texts that so many beams find.
    length_penalty, early_stopping: as in transformers. A text's score is the sum of its tokens' log-probabilities
    divided by their number to the power of length_penalty. The search ends when as many texts have ended as there are
    beams (early_stopping True), when beams are unlikely to become better than these (False), or when they cannot
    ("never"). Penalties and biases then apply to log-probabilities, and logprobs report the result.

    At most one of these may constrain the text: json_schema: a JSON value that this schema (a dict, or its text)
    allows; regex: a text that this regular expression (in the syntax of Rust's `regex` crate) matches as a whole;
    grammar: a text that this grammar in Lark's EBNF derives from its rule `start`. The text is complete if the finish
    reason is "stop". With a constraint, stop, stop_token_ids, ignore_eos and min_tokens are ignored, because the
    grammar says where a text may end.
    """

    max_tokens: int = setting(128, "Most tokens to generate.")
    temperature: float | None = setting(None, "0 is greedy.", unset="the engine's")
    top_p: float | None = setting(None, "Likeliest tokens with this total probability.", unset="the engine's")
    top_k: int | None = setting(None, "So many of the likeliest tokens; 0: all tokens.", unset="the engine's")
    min_p: float | None = setting(None, "Least probability, as a share of the largest.", unset="the engine's")
    repetition_penalty: float | None = setting(None, "For tokens of prompt and output; 1 is off.", unset="the engine's")
    presence_penalty: float = setting(0.0, "For tokens that are in the output.")
    frequency_penalty: float = setting(0.0, "For each time that a token is in the output.")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = setting(None, "The same seed gives the same tokens.", unset="drawn")
    stop: tuple[str, ...] = setting((), "End before this text (repeatable).", metavar="TEXT")
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = setting(False, "Continue after the model's end token.")
    min_tokens: int = setting(0, "Least tokens to generate.")
    logprobs: int | None = None
    n: int = 1
    include_stop: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    score_ids: tuple[int, ...] = ()
    speculative: bool = True
    watermark: Watermark | None = setting(None, "Mark the text for `icc detect`.", metavar=FORM, read=watermark)
    json_schema: Mapping[str, Any] | str | None = setting(
        None, "The text is a JSON value that this schema allows.", metavar="JSON|@FILE", read=json_schema
    )
    regex: str | None = setting(None, "The text matches this regular expression.", metavar="REGEX")
    grammar: str | None = setting(None, "The text follows this grammar in Lark's EBNF.", metavar="TEXT")
    beams: int = setting(1, "Beam search with N beams instead of sampling; 1 turns it off.")
    length_penalty: float = setting(1.0, "For beams: above 0 prefers longer texts, below 0 shorter ones.")
    early_stopping: bool | str = setting(
        False, "For beams: true, false or never, as in transformers.", metavar="WHEN", read=stops_early
    )

    def __post_init__(self) -> None:
        for name in BOUNDS:
            _check_number(name, getattr(self, name))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "score_ids"):
            if not isinstance(given := getattr(self, name), Iterable):
                raise _invalid(name, given, "must be a list")
            object.__setattr__(self, name, tuple(given))
        for name in ("ignore_eos", "include_stop", "skip_special_tokens", "speculative"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "must be true or false")
        _check_words(self)
        if self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})")
        _check_stops(self.stop)
        _check_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS)
        if isinstance(self.watermark, str):
            object.__setattr__(self, "watermark", _read_watermark(self.watermark))
        _check_token_ids("score_ids", self.score_ids, MAX_SCORED)
        _check_token_ids("logit_bias", tuple(self.logit_bias), MAX_BIASES)
        for bias in self.logit_bias.values():
            if not isinstance(bias, int | float) or not abs(bias) <= MAX_BIAS:
                raise _invalid("logit_bias", bias, f"must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        if isinstance(self.json_schema, str):
            object.__setattr__(self, "json_schema", _read_schema(self.json_schema))
        _check_form(self.json_schema, self.regex, self.grammar)
        _check_beams(self)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: the temperature is 0 or None."""
        return not self.temperature

    @property
    def asks_for_a_form(self) -> bool:
        """Whether the text must follow a schema, a regular expression or a grammar."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    def of_a_form(self) -> SamplingParams:
        """These parameters without stop conditions, for a text under a grammar: only the grammar says where the text
        ends."""
        return replace(self, ignore_eos=False, min_tokens=0, stop=(), stop_token_ids=(), include_stop=False)

    def resolve(self, defaults: SamplingDefaults) -> SamplingParams:
        """These parameters with defaults in place of None. With beams the temperature is 0."""
        return replace(
            self,
            temperature=0.0 if self.beams > 1 else _first(self.temperature, defaults.temperature, 0.0),
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            top_k=int(_first(self.top_k, defaults.top_k, 0)),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
        )


def params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts; params None: the default for all. RequestError if their number
    differs."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} params", field="params")
    return list(params)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _invalid(name: str, value: object, rule: str) -> RequestError:
    try:
        shown = repr(value)
    except ValueError:  # an integer with thousands of digits
        shown = "a huge number"
    return RequestError(f"{name} = {shown if len(shown) <= 60 else shown[:60] + '…'}: {rule}", field=name)


def _check_number(name: str, value: object) -> None:
    if value is None and name not in _REQUIRED:
        return
    low, high = BOUNDS[name]
    kind = int if name in INTEGERS else (int | float)
    word = "an integer" if name in INTEGERS else "a number"
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _invalid(name, value, f"must be {word}")
    if not low <= value <= high:  # NaN fails this, too
        raise _invalid(name, value, f"must be from {bounds(low, high)}")


def _read_watermark(text: str) -> Watermark:
    try:
        return watermark(text)
    except ValueError as error:
        raise RequestError(f"watermark: {error}", field="watermark") from error


def _read_schema(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid("json_schema", text, f"must be JSON: {error}") from error


def _check_form(json_schema: object, regex: object, grammar: object) -> None:
    """Check the constraints of the text."""
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)}: at most one of them can be given", field=next(iter(given)))
    for name, value in given.items():
        if name == "json_schema" and not isinstance(value, Mapping):
            raise _invalid(name, value, "must be a JSON schema: an object")
        if name != "json_schema" and (not isinstance(value, str) or not value):
            raise _invalid(name, value, "must be a text that is not empty")


def _check_beams(params: SamplingParams) -> None:
    """Check the parameters of beam search, and those that exclude it."""
    if params.early_stopping not in (True, False, "never") or not isinstance(params.early_stopping, bool | str):
        raise _invalid("early_stopping", params.early_stopping, 'must be true, false or "never"')
    if params.beams == 1:
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(params, name) != default:
                raise _invalid(name, getattr(params, name), "only a beam search has it: give beams, 2 or more")
    elif params.temperature:
        raise _invalid("temperature", params.temperature, "a beam search does not sample: leave it out, or give 0")
    elif params.n > params.beams:
        raise _invalid("n", params.n, f"must not exceed beams ({params.beams})")
    elif params.watermark is not None:
        raise _invalid("watermark", params.watermark, "beam search does not sample, which is what a mark is in")


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise _invalid("stop", len(stops), f"at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise _invalid("stop", stop, "must be strings that are not empty")
        if len(stop.encode(errors="surrogatepass")) > MAX_STOP_BYTES:
            raise _invalid("stop", stop[:20] + "…", f"at most {MAX_STOP_BYTES} bytes each")


def _check_words(params: SamplingParams) -> None:
    """Check forbidden and allowed tokens."""
    object.__setattr__(params, "bad_words", tuple(tuple(word) for word in params.bad_words))
    if len(params.bad_words) > MAX_BAD_WORDS or not all(params.bad_words):
        raise _invalid("bad_words", len(params.bad_words), f"at most {MAX_BAD_WORDS} sequences, none of them empty")
    for word in params.bad_words:
        _check_token_ids("bad_words", word, MAX_STOP_BYTES)
    if params.allowed_token_ids is not None:
        object.__setattr__(params, "allowed_token_ids", tuple(params.allowed_token_ids))
        if not params.allowed_token_ids:
            raise _invalid("allowed_token_ids", (), "must not be empty")
        _check_token_ids("allowed_token_ids", params.allowed_token_ids, MAX_ALLOWED)


def _check_token_ids(name: str, token_ids: tuple[int, ...], limit: int) -> None:
    if len(token_ids) > limit:
        raise _invalid(name, len(token_ids), f"at most {limit} token ids")
    for token in token_ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise _invalid(name, token, "must be token ids")
