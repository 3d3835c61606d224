"""How a checkpoint's linear layers are packed, by the quantization_config of its config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Packing:
    """kind: whose layout the tensors have. bits: of a code. one_less: zeros are stored one smaller (GPTQ v1)."""

    kind: Literal["gptq", "awq", "compressed", "int8"]
    bits: int
    one_less: bool = False


def packing_of(facts: Mapping[str, Any]) -> Packing | None:
    """What a quantization_config says; None for what icc does not read."""
    made = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}.get(str(facts.get("quant_method")))
    return made(facts) if made else None


def _gptq(facts: Mapping[str, Any]) -> Packing | None:
    kind, bits = facts.get("checkpoint_format") or "gptq", facts.get("bits")
    return Packing("gptq", bits, kind == "gptq") if kind in ("gptq", "gptq_v2") and bits in (4, 8) else None


def _awq(facts: Mapping[str, Any]) -> Packing | None:
    version = str(facts.get("version") or facts.get("format") or "gemm").lower()
    return Packing("awq", 4) if version == "gemm" and facts.get("bits", facts.get("w_bit", 4)) == 4 else None


def _compressed(facts: Mapping[str, Any]) -> Packing | None:
    groups = [g for g in (facts.get("config_groups") or {}).values() if isinstance(g, dict)]
    schemes = [g.get("weights") or {} for g in groups]
    bits = {s.get("num_bits") for s in schemes}
    if len(bits) != 1 or any(s.get("type") != "int" for s in schemes) or not bits <= {4, 8}:
        return None
    kind = {"pack-quantized": "compressed", "int-quantized": "int8"}.get(str(facts.get("format")))
    return Packing(kind, bits.pop()) if kind else None  # type: ignore[arg-type]
