"""The request bodies of the API. At the top level an unknown field is an error, so that typos are noticed; null, and
the values in OTHERS, are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ...embed_prompts import EmbedOptions
from ...watermark.settings import BOUNDS as WATERMARK
from ...watermark.settings import MOST_KEYS, Method
from . import limits
from .conversation import Content, FunctionName, Message, Tool, ToolChoice, ToolFunction
from .fields import Int64, JsonText, Lark, Name, Regex, Stop, Text, TokenId, Tokens
from .formats import Choices, ResponseFormat, StructuredOutputs

# fields of other servers, with the value that has no effect; other values are refused
OTHERS: dict[str, bool | int | float | list[Any]] = {
    "cache_prompt": True,
    "detokenize": True,
    "diversity_penalty": 0,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "mirostat": 0,
    "no_stop_trim": False,
    "return_hidden_states": False,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "separate_reasoning": True,
    "spaces_between_special_tokens": True,
    "stream_reasoning": True,
    "typical_p": 1,
}
# fields of search methods that neither icc nor transformers 5 has, and the names of the methods
NO_SUCH_SEARCH = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "num_beam_groups": "diverse beam search",
    "diversity_penalty": "diverse beam search",
    "force_words_ids": "constrained beam search",
    "constraints": "constrained beam search",
}


class StreamOptions(Struct, frozen=True):
    """include_usage: a last chunk with the usage; continuous_usage_stats: the usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AdapterScale(Struct, forbid_unknown_fields=True, frozen=True):
    """An adapter by its number in /lora-adapters, and the factor of its effect, as in llama.cpp's server."""

    id: Annotated[int, Meta(ge=0, le=100_000)]
    scale: Annotated[float, Meta(ge=-100, le=100)]


# msgspec's own bounds have at most 63 bits
MarkKey = Annotated[int, Meta(ge=1, extra_json_schema={"maximum": int(WATERMARK["key"][1])})]


class WatermarkOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """How the answer is marked for `icc detect`; see watermark.settings.Watermark."""

    key: MarkKey | Annotated[list[MarkKey], Meta(min_length=1, max_length=MOST_KEYS)]
    method: Method = "kgw"
    ratio: Annotated[float, Meta(ge=WATERMARK["ratio"][0], le=WATERMARK["ratio"][1])] = 0.25
    bias: Annotated[float, Meta(ge=WATERMARK["bias"][0], le=WATERMARK["bias"][1])] = 2.0
    alpha: Annotated[float, Meta(ge=WATERMARK["alpha"][0], le=WATERMARK["alpha"][1])] = 0.1


class KVTransferParams(Struct, frozen=True):
    """Transfer of a prompt's KV from or to another server, with the fields of vLLM's connectors. do_remote_decode:
    publish the KV for another server on this host, under the name remote_engine_id if `new_kv_name` made it, else under
    a new name; the answer tells the name. do_remote_prefill: take the KV published under remote_engine_id; what cannot
    be taken is computed."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[int] | None = None
    remote_host: str | None = None
    remote_port: int | None = None


class Common(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Fields that completions and chat completions share. `user` and the fields after it are accepted and ignored,
    except prompt_cache_key and prompt_cache_retention, which ask to keep the prompt in the prefix cache.

    model: "" is the served model, as in other requests. best_of: how many completions are generated; the `n` best are
    returned: the likeliest per token, or those that the server's judge scores highest. use_beam_search: beam search
    with `n` beams, or with `best_of`, as in vLLM; length_penalty and early_stopping as in transformers. seed: -1 is
    none. top_k: -1 is off. truncate_prompt_tokens: how many of the prompt's last tokens are kept, -1: as many as fit.
    bad_words: texts that are not generated. lora: an adapter by name (also possible in `model`), or by llama.cpp's
    number with a scale. guided_*: older names of structured_outputs. speculative: false turns speculative decoding off.
    """

    model: str = ""
    n: Annotated[int, limits.bound("n")] = 1
    best_of: Annotated[int, limits.bound("best_of")] | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, limits.bound("length_penalty")] = 1.0
    early_stopping: bool | Literal["never"] = False
    max_tokens: Annotated[int, limits.bound("max_tokens")] | None = None
    min_tokens: Annotated[int, limits.bound("min_tokens")] = 0
    temperature: Annotated[float, limits.bound("temperature")] | None = None
    top_p: Annotated[float, limits.bound("top_p")] | None = None
    top_k: Annotated[int, limits.bound("top_k")] | None = None
    min_p: Annotated[float, limits.bound("min_p")] | None = None
    repetition_penalty: Annotated[float, limits.bound("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, limits.bound("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, limits.bound("frequency_penalty")] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, limits.bound("logit_bias")]],
            Meta(max_length=limits.BIASES),
        ]
        | None
    ) = None
    seed: Annotated[int, limits.bound("seed")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=limits.STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=limits.STOP_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    speculative: bool = True
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    bad_words: Annotated[list[Stop], Meta(max_length=limits.STOPS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=limits.ALLOWED_IDS)] | None = None
    truncate_prompt_tokens: Annotated[int, limits.bound("truncate_prompt_tokens")] | None = None
    prompt_logprobs: Annotated[int, limits.bound("prompt_logprobs")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonText | dict[str, Any] | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Lark | None = None
    priority: Annotated[int, limits.bound("priority")] = 0
    deadline: Annotated[float, limits.bound("deadline")] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    lora: Annotated[str, Meta(max_length=256)] | Annotated[list[AdapterScale], Meta(max_length=64)] | None = None
    watermark: WatermarkOptions | None = None
    kv_transfer_params: KVTransferParams | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = None
    guided_decoding_backend: str | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """POST /v1/completions. max_tokens: 0 generates nothing, for a prompt that is only scored. suffix: the text after
    the completion, for models that fill in the middle."""

    prompt: str | list[str | int | list[int]]
    suffix: Text | None = None
    echo: bool | None = None
    logprobs: Annotated[int, limits.bound("logprobs")] | None = None


class Prediction(Struct, frozen=True):
    """A guess at the answer: a hint that changes no answer."""

    content: Content
    type: Literal["content"] = "content"


class ChatRequest(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions. verbosity and reasoning_effort are given to the chat template. functions and
    function_call are the older names of tools and tool_choice; the answer is then in the older form too."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=limits.MESSAGES)]
    max_tokens: Annotated[int, limits.bound("max_tokens", low=1)] | None = None
    max_completion_tokens: Annotated[int, limits.bound("max_completion_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, limits.bound("top_logprobs")] | None = None
    tools: Annotated[list[Tool], Meta(max_length=limits.TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[ToolFunction], Meta(max_length=limits.TOOLS)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Prediction | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[Name, str | Int64 | float | bool | None] | None = None
    documents: Annotated[list[dict[str, str]], Meta(max_length=limits.MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class EmbeddingRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/embeddings. `user` is accepted and ignored; the fields from `prompt` to it are extensions. prompt: put
    before each text; prompt_name selects one of the model's prompts instead, and input_type and task are other names of
    prompt_name. Token ids get no prompt. truncate: a text that is too long is cut at its end, with "START" at its
    beginning. truncate_prompt_tokens: the most tokens, -1: as many as the engine takes."""

    model: str = ""
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, limits.bound("dimensions")] | None = None
    prompt: Text | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    task: str | None = None
    truncate: bool | Literal["NONE", "START", "END"] | None = None
    truncate_prompt_tokens: Annotated[int, limits.bound("truncate_prompt_tokens")] | None = None
    priority: Annotated[int, limits.bound("priority")] = 0
    deadline: Annotated[float, limits.bound("deadline")] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    user: str | None = None

    @property
    def options(self) -> EmbedOptions:
        """The prompt of a text, and how a text that is too long is cut."""
        longest = self.truncate_prompt_tokens or None
        cuts = "start" if self.truncate == "START" else bool(longest or self.truncate not in (None, False, "NONE"))
        name = next((one for one in (self.prompt_name, self.input_type, self.task) if one is not None), None)
        longest = None if longest == -1 else longest
        return {"prompt": self.prompt, "prompt_name": name, "truncate": cuts, "longest": longest}


class RerankDocument(Struct, forbid_unknown_fields=True, frozen=True):
    """A document of a rerank request that is an object instead of a text."""

    text: Text


class RerankRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/rerank, as Jina and Cohere define it. `user` is accepted and ignored; the three fields before it are
    extensions. truncate_prompt_tokens: the most tokens of a pair, whose longer text is cut at its end; -1: as many as
    the engine takes."""

    model: str = ""
    query: Text
    documents: Annotated[list[Text | RerankDocument], Meta(min_length=1, max_length=limits.INPUTS)]
    top_n: Annotated[int, limits.bound("top_n")] | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Annotated[int, limits.bound("truncate_prompt_tokens")] | None = None
    priority: Annotated[int, limits.bound("priority")] = 0
    deadline: Annotated[float, limits.bound("deadline")] | None = None
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class TokenizeRequest(Struct, forbid_unknown_fields=True, frozen=True):
    """POST /tokenize: of a text, or of a conversation, which gets its special tokens from the model's template."""

    prompt: Text | UnsetType = UNSET
    messages: Annotated[list[Message], Meta(min_length=1, max_length=limits.MESSAGES)] | UnsetType = UNSET
    model: str | None = None
    add_special_tokens: bool = True
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=limits.TOOLS)] | None = None
    chat_template_kwargs: dict[Name, str | Int64 | float | bool | None] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True, frozen=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


# An adapter's name may be a file in --lora-dir, and file systems allow at most 255 bytes.
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}(/[A-Za-z0-9][A-Za-z0-9_.+-]{0,99})?$"


class LoadAdapterRequest(Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/load_lora_adapter, as in vLLM. load_inplace: replace a loaded adapter of that name."""

    lora_name: Annotated[str, Meta(pattern=ADAPTER_NAME)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/unload_lora_adapter, as in vLLM. `lora_int_id` is accepted and ignored."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_int_id: int | None = None


class RefitRequest(Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/refit. wait_s: the seconds that running requests have to end."""

    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 60.0


class EngineRequest(RefitRequest, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/engine. engine: the name of a directory beside the engine that is served."""

    engine: Annotated[str, Meta(min_length=1, max_length=255)]


# msgspec examines annotations when a type is first used: done now, not during the first request
for _kind in (CompletionRequest, ChatRequest, EmbeddingRequest, RerankRequest, TokenizeRequest, DetokenizeRequest):
    msgspec.json.Decoder(_kind)


def prompts(prompt: str | list[Any], most: int = limits.PROMPTS) -> list[str] | list[list[int]]:
    """The prompts of a request as a list. ValueError if they do not match PROMPT_SCHEMA, or INPUT_SCHEMA with its
    `most`."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ValueError("an empty list")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [_tokens(prompt)]
    if len(prompt) > most:
        raise ValueError(f"{len(prompt)} prompts, at most {most}")
    if kinds == {str}:
        return prompt
    if kinds == {list}:
        return [_tokens(item) for item in prompt]
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")


def _tokens(items: object) -> list[int]:
    return msgspec.convert(items, Tokens)
