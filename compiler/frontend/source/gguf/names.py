"""Maps tensors of a GGUF file to parameters of transformers' model, by the tables of the `gguf` package."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ....errors import UnsupportedModel
from .architectures import Architecture
from .keys import NAMES

LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_HALF = re.compile(r"blk\.\d+\.ffn_(gate|up)_exps\.(?:weight|bias)")
# matrices that a file splits into two, the first rows first, by the suffix of transformers' name
_STACKED = {
    "shared_mlp.input_linear.weight": (
        "ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_gate.weight", "ffn_up.weight",
    ),
    "linear_attn.in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
}  # fmt: skip
# transformers' names of a layer's expert matrices: gate and up in one, and down
_EXPERTS = re.compile(
    r"(?:.*\.)?layers\.\d+\..*(?:experts\.(gate_up|up|down)_proj(_bias)?|block_sparse_moe\.(input|output)_linear\.weight)"
)


def places(
    arch: str, own: Architecture, tensors: Collection[str], parameters: Iterable[str], config: Any, processor: Any
) -> dict[str, str]:
    """The name of the model's parameter for each tensor name that a file may have; tensors without one are not in it.

    tensors: the file's tensor names. parameters: the model's parameter names. processor: transformers' rules of the
    architecture. "#gate" or "#up" at the end of a name means a half of the parameter. UnsupportedModel if the gguf
    package does not know the architecture.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    aliases = NAMES | dict(own.names)
    number = next((key for key, value in MODEL_ARCH_NAMES.items() if value == arch), None)
    if number is None:
        raise UnsupportedModel(f"the gguf package does not know the architecture {arch!r}", "a newer one may")
    table = get_tensor_name_map(number, config.get_text_config().num_hidden_layers)
    found: dict[str, str] = {}
    left: list[str] = []
    for name in parameters:
        layer = LAYER.match(name)
        if layer and (parts := _in_layer(tensors, name, int(layer[1]), aliases)):
            found |= parts
            continue
        plain, suffix = _split(processor.preprocess_name(name))
        ours = table.get_name(plain)
        if ours is None and (whole := table.get_name(name)) is not None:
            ours, suffix = whole, ""  # the table has the name with its suffix
        if ours is None:
            processor.perform_fallback_tensor_mapping(found, suffix, "", name)
            left.append(name)
        else:
            found[ours + suffix] = name
    for name in left:  # models that llama.cpp converts without their head know shorter names
        plain, suffix = _split(name)
        while "." in plain:
            plain = plain.split(".", 1)[1]
            if (ours := table.get_name(plain) or table.get_name(f"backbone.{plain}")) is not None:
                found.setdefault(ours + suffix, name)
                break
    return found


def _in_layer(tensors: Collection[str], name: str, layer: int, aliases: Mapping[str, str]) -> dict[str, str]:
    """The tensors of a layer's parameter that a file splits or names differently; {} for other parameters."""
    block = f"blk.{layer}"
    if name.endswith("self_attn.kv_b_proj.weight") and f"{block}.attn_kv_b.weight" not in tensors:
        return {f"{block}.attn_{half}_b.weight": f"{name}.{half}" for half in ("k", "v")}  # see `latent`
    if experts := _EXPERTS.fullmatch(name):
        part, bias, linear = experts.groups()
        alone = "down" if linear == "output" else part
        halves = (alone,) if alone in ("up", "down") else ("gate", "up", "gate_up")
        return {f"{block}.ffn_{half}_exps.{'bias' if bias else 'weight'}": name for half in halves}
    if stacked := stacked_halves(name):
        return {f"{block}.{ours}": f"{name}#{half}" for ours, half in stacked.items()}
    if name.endswith("shared_mlp.output_linear.weight"):
        return {f"{block}.ffn_down{kind}.weight": name for kind in ("", "_shexp")}
    return {f"{block}.{ours}": name for end, ours in aliases.items() if name.endswith(f".{end}")}


def _split(name: str) -> tuple[str, str]:
    for suffix in (".weight", ".bias"):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def stacked_halves(name: str) -> dict[str, str]:
    """The two or four possible tensors of a layer that are halves of the parameter `name`, each with its half, "gate"
    or "up"; {} for a parameter without halves."""
    ours = next((ours for end, ours in _STACKED.items() if name.endswith(end)), ())
    return {tensor: ("gate", "up")[place % 2] for place, tensor in enumerate(ours)}


def layer_of(name: str) -> int:
    """The layer number of a tensor of the file, from its name; -1 if it belongs to no layer."""
    number = name.split(".")[1] if name.startswith("blk.") else ""
    return int(number) if number.isdecimal() else -1


def place_of(names: Mapping[str, str], name: str) -> tuple[str, str | None]:
    """Which half of a parameter a tensor is, "" for a whole parameter; and the parameter's name, None if there is
    none."""
    place = names.get(name) or names.get(name.removesuffix(".weight")) or names.get(f"{name}.weight")
    place = place or names.get(f"{name}.bias")
    if place is not None and "#" in place:
        return place.partition("#")[2], place.partition("#")[0]
    half = _HALF.fullmatch(name)
    return half[1] if half else "", place
