"""Damaged checkpoints of every packed kind: missing tensors, other shapes, types or contents, and nonsensical
configurations give a one-line error, or consistent weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from icc.compiler.errors import IccError, TensorError
from icc.compiler.frontend.source.packed import unpacked
from icc.compiler.frontend.source.packing import packing_of
from icc.compiler.weights.handles import Constant, QuantizedWeight
from safetensors.torch import load_file
from sizes import size_of
from test_e2m1 import blocks, nvfp4
from test_float8_checkpoints import COMPRESSED, GROUP, MODELOPT, of_modelopt, of_transformers
from test_packed import CONFIGS, layer
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]
TYPES = (torch.float32, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
NONSENSE: tuple[Any, ...] = (
    None, 0, -1, 3, 2**63, 1e308, float("nan"), "", "gemm", "4", True, [], [128, 128], [0, 1], ["x"], {}, {"a": None},
    {"bits": 4}, [[]],
)  # fmt: skip


def of_layer(kind: str, bits: int = 4, act: int = 0) -> Tensors:
    return {f"a.{name}": value for name, value in layer(kind, 24, 64, bits, 32, act=act)[0].items()}


def of_float8(block: tuple[int, int] | None) -> Tensors:
    return {f"a.{n}": v for n, v in of_transformers(torch.randn(32, 64), block)[0].items()}


def gpt_oss() -> Tensors:
    codes, scales = blocks(2, 8, 64)
    return {"a_blocks": codes, "a_scales": scales}


def bitsandbytes() -> Tensors:
    return load_file(Path(__file__).parent / "data/bitsandbytes.safetensors")


KINDS: dict[str, tuple[Config, Callable[[], Tensors]]] = {
    "gptq": (CONFIGS["gptq"], lambda: of_layer("gptq")),
    "act-order": (CONFIGS["act-order"], lambda: of_layer("gptq", act=1)),
    "gptq8": (CONFIGS["gptq"] | {"bits": 8}, lambda: of_layer("gptq", 8)),
    "awq": (CONFIGS["awq"], lambda: of_layer("awq")),
    "compressed": (CONFIGS["compressed"], lambda: of_layer("compressed", act=1)),
    "int8": (
        {
            "quant_method": "compressed-tensors", "format": "int-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}},
        },
        lambda: {f"a.{name}": value for name, value in layer("int8", 24, 64, 8, 64)[0].items()},
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda: of_float8((32, 32))),
    "float-quantized": (COMPRESSED | {"config_groups": {"a": GROUP}}, lambda: of_float8(None)),
    "modelopt": (MODELOPT, lambda: {f"a.{n}": v for n, v in of_modelopt(torch.randn(32, 64), (1, 1, 2, 1))[0].items()}),
    "nvfp4": (MODELOPT | {"quant_algo": "NVFP4"}, lambda: nvfp4(8, 64)),
    "mxfp4": ({"quant_method": "mxfp4"}, gpt_oss),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes),
}  # fmt: skip


def damaged(tensors: Tensors, rng: random.Random) -> Tensors:
    """The tensors with one or two removed, or changed in shape, type or content."""
    found = dict(tensors)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(sorted(found))
        value, what = found[name], rng.randrange(7)
        if what == 0:
            del found[name]
        elif what == 1 and value.dim():
            axis = rng.randrange(value.dim())
            found[name] = value.narrow(axis, 0, rng.randrange(value.shape[axis] + 1)).contiguous()
        elif what == 2:
            found[name] = rng.choice([value.reshape(-1), value.unsqueeze(0), value[None, None], torch.zeros(())])
        elif what == 3:
            found[name] = value.to(torch.float32).nan_to_num().clamp(-100, 100).to(rng.choice(TYPES))
        elif what == 4 and value.numel():
            raw = value.clone().contiguous().reshape(-1).view(torch.uint8)
            raw[rng.randrange(len(raw))] = rng.randrange(256)
            found[name] = raw.view(value.dtype).reshape(value.shape)
        elif what == 5 and value.dtype.is_floating_point:
            bad = rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e38])
            found[name] = torch.full_like(value.float(), bad).to(value.dtype)
        elif value.dim() > 1:
            found[name] = value.transpose(0, 1).contiguous()
        if not found:
            break
    return found


def spoilt(config: Config, rng: random.Random) -> Config:
    """The configuration with one value at any depth replaced or removed."""
    found = copy.deepcopy(config)
    inside = found
    while True:
        key = rng.choice(sorted(inside))
        if isinstance(inside[key], dict) and inside[key] and rng.random() < 0.8:
            inside = inside[key]
            continue
        if rng.random() < 0.2:
            del inside[key]
        else:
            inside[key] = rng.choice(NONSENSE)
        return found


def read(config: Config, tensors: Tensors) -> None:
    """Read a checkpoint's weights as opening it and writing its engine do."""
    packing = packing_of({"quantization_config": config}, Path("model"))
    if packing is None:
        return
    for name, weight in unpacked({name: Constant(value) for name, value in tensors.items()}, packing).items():
        if isinstance(weight, QuantizedWeight):
            parts = weight.parts()
            for part, array in weight.format.arrays(weight.shape).items():
                assert tuple(parts[part].shape) == array.shape, f"{name}: {part}"
            assert tuple(weight.load().shape) == weight.shape, name


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_an_error_in_words(kind: str) -> None:
    config, made = KINDS[kind]
    tensors, rng = made(), random.Random(kind)
    read(config, tensors)
    refused = 0
    for number in range(size_of("damaged_checkpoints")):
        facts = spoilt(config, rng) if number % 3 == 0 else config
        given = tensors if number % 3 == 0 else damaged(tensors, rng)
        try:
            read(facts, given)
        except IccError as error:
            refused += 1
            assert error.message and "\n" not in error.message
    assert refused


@pytest.mark.parametrize("kind", ["fp8", "modelopt", "bitsandbytes"])
def test_a_matrix_without_columns(kind: str) -> None:
    config, made = KINDS[kind]
    tensors = made()
    name = max(tensors, key=lambda found: tensors[found].numel())
    tensors[name] = tensors[name][:, :0]
    with pytest.raises(TensorError, match=r"elements|bytes for"):
        read(config, tensors)
