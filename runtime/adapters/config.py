"""adapter_config.json of PEFT: reads the fields that inference needs and refuses those that icc does not support."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import msgspec

from ..errors import AdapterError
from .adapter import Start
from .files import read_file
from .patterns import ends_with

CONFIG_FILE = "adapter_config.json"
_MAX_BYTES = 4 << 20
_MOST_SAID = 500  # characters of an error text that quotes values of fields
_MAX_RANK, _MAX_PATTERNS = 1 << 20, 10_000
# Fields about the training or origin of an adapter, which have no effect at inference.
_TRAINING = frozenset(
    {
        "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "exclude_modules",
        "lora_dropout", "layers_to_transform", "layers_pattern", "eva_config", "corda_config",
        "lora_ga_config", "runtime_config", "ensure_weight_tying", "qalora_group_size", "megatron_core",
    }
)  # fmt: skip
# Fields that would change what is computed, with PEFT's default, the only value that icc accepts.
_REFUSED: dict[str, Any] = {
    "megatron_config": None, "layer_replication": None, "use_qalora": False, "use_bdlora": None, "arrow_config": None,
    "kasa_config": None, "velora_config": None, "monteclora_config": None,
}  # fmt: skip
# Initializations of A and B that leave the base weight as it is.
_PLAIN_INITIALS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Initializations that change the base weight in a way that can be computed from it: PiSSA (Meng et al. 2024,
# arXiv:2404.02948) subtracts its first singular vectors, OLoRA (Buyukakyuz 2024, arXiv:2406.01775) the first columns of
# Q and rows of R; LoftQ (Li et al. 2023, arXiv:2310.08659) quantizes it.
_STARTS = ("pissa", "olora", "loftq")
# Initializations that cannot be computed from it, by the beginning of PEFT's names.
_LOST = {
    "pissa_niter_": "singular vectors that were found with random numbers (PiSSA by iterations)",
    "corda": "what a text said of its inputs (CorDA)",
    "lora_ga": "gradients of a text (LoRA-GA)",
}


class LoftqConfig(msgspec.Struct, frozen=True):
    """The field loftq_config; defaults as in PEFT."""

    loftq_bits: int = 4
    loftq_iter: int = 1


class LoraConfig(msgspec.Struct, frozen=True):
    """The fields that icc uses; defaults as in PEFT."""

    peft_type: str = ""
    base_model_name_or_path: str | None = None
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    alora_invocation_tokens: list[int] | None = None
    init_lora_weights: bool | str | None = True
    loftq_config: LoftqConfig | None = None

    @property
    def initial(self) -> bool | str | None:
        """How A and B were initialized, PEFT's name in lower case, as PEFT compares it; None if the file says null."""
        found = self.init_lora_weights
        return found.lower() if isinstance(found, str) else found

    @property
    def start(self) -> Start | None:
        """How the base weight was changed before the training, see Start; None if it was not."""
        if self.initial not in _STARTS:
            return None
        loftq = self.loftq_config or LoftqConfig()
        return Start("loftq", loftq.loftq_bits, loftq.loftq_iter) if self.initial == "loftq" else Start(self.initial)  # type: ignore[arg-type]

    def rank(self, module: str) -> int:
        """The rank of the change to a module or a targeted parameter, by its name."""
        return _matching(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """The factor of B A."""
        rank, alpha = self.rank(module), _matching(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Whether a module itself is targeted, by the end of its name or by a regular expression, and not only its
        parameters. AdapterError for an expression that could take too long."""
        if isinstance(self.target_modules, str):
            return ends_with(module, self.target_modules)
        return any(f".{module}".endswith(f".{target}") for target in self.target_modules or ())

    def trains_whole(self, module: str) -> bool:
        """Whether all of a module was trained; PEFT also saves embeddings that were not."""
        return any(ends_with(module, re.escape(name)) for name in self.modules_to_save or ())

    def token_ids(self, module: str) -> tuple[int, ...]:
        """The rows of an embedding that were trained, in the order of their values."""
        found = self.trainable_token_indices
        if isinstance(found, dict):
            return tuple(next((ids for name, ids in found.items() if ends_with(module, re.escape(name))), ()))
        return tuple(found or ())


# All fields that icc knows; a test compares them with PEFT's.
KNOWN_FIELDS = frozenset({*LoraConfig.__struct_fields__, *_TRAINING, *_REFUSED})


def _matching(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a name: patterns are regular expressions, as in PEFT."""
    return next((value for pattern, value in (patterns or {}).items() if ends_with(name, pattern)), default)


def read_config(folder: Path) -> tuple[bytes, LoraConfig]:
    """The bytes of the file and its fields. AdapterError for a tuner other than LoRA, and for fields that icc does not
    support."""
    path = folder / CONFIG_FILE
    try:
        raw = read_file(path, _MAX_BYTES)
        fields = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{path} is damaged: {error}") from None
    try:
        return raw, _checked(fields)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error.message[:_MOST_SAID]}", error.hint) from None


def _checked(fields: dict[str, Any]) -> LoraConfig:
    tuner = fields.get("peft_type")
    if tuner != "LORA":
        raise AdapterError(f"peft_type is {tuner!r}, not 'LORA'", "convert it: peft's save_as_lora")
    for name, value in fields.items():
        if name in _REFUSED and value != _REFUSED[name] and value not in (None, False, {}, []):
            raise AdapterError(f"{name} is {value!r}, which icc does not do", "merge it with peft, then compile that")
        if name not in KNOWN_FIELDS and value not in (None, False, {}, [], ""):
            raise AdapterError(
                f"icc does not know the field {name!r}, which is {value!r}",
                "update icc, or merge the adapter with peft, then compile that",
            )
    try:
        config = msgspec.convert(
            {name: fields[name] for name in fields if name in LoraConfig.__struct_fields__}, LoraConfig
        )
    except msgspec.ValidationError as error:
        raise AdapterError(str(error)) from None
    ranks = (config.r, *(config.rank_pattern or {}).values())
    if not all(1 <= rank <= _MAX_RANK for rank in ranks):
        raise AdapterError(f"a rank is less than 1, or more than {_MAX_RANK}")
    if not all(map(isfinite, (config.lora_alpha, *(config.alpha_pattern or {}).values()))):
        raise AdapterError("an alpha is no finite number")
    if len(ranks) + len(config.alpha_pattern or ()) > _MAX_PATTERNS:
        raise AdapterError(f"it has more than {_MAX_PATTERNS} patterns")
    _check_start(config)
    return config


def _check_start(config: LoraConfig) -> None:
    """Refuse an adapter whose A and B were trained on something that cannot be computed from the base."""
    initial, start = config.initial, config.start
    if start is not None and start.kind == "loftq" and not (start.bits in (4, 8) and 1 <= start.iterations <= 64):
        raise AdapterError(f"loftq_config says {start.bits} bits and {start.iterations} iterations")
    if initial not in (*_PLAIN_INITIALS, *_STARTS):
        found = (why for name, why in _LOST.items() if isinstance(initial, str) and initial.startswith(name))
        raise AdapterError(
            f"init_lora_weights is {initial!r}: it was trained on a base that was changed first"
            + "".join(f", by {why}, which are not in the adapter" for why in found),
            "convert it with peft: save_pretrained(.., path_initial_model_for_weight_conversion=..)",
        )
