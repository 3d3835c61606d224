"""How the weights of a checkpoint are packed, by what its config.json says; packed.py reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import UnsupportedModel


@dataclass(frozen=True)
class Packing:
    """kind: whose layout the tensors have. bits: of a code. one_less: zeros are stored one smaller (GPTQ v1)."""

    kind: Literal["gptq", "awq", "compressed", "int8"]
    bits: int
    one_less: bool = False


def packing_of(config: Mapping[str, Any], path: Path) -> Packing | None:
    """How a checkpoint is packed, by its config.json; None if it is not. UnsupportedModel names what is not read."""
    facts = _stated(config)
    if facts is None:
        return None
    method = str(facts.get("quant_method") or "unknown method")
    made = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}.get(method)
    packing = made(facts) if made else None
    if packing is None:
        what = facts.get("format") or facts.get("checkpoint_format") or facts.get("version") or ""
        raise UnsupportedModel(
            f"{path} is already quantized ({' '.join([method, str(what)]).strip()})",
            "icc reads GPTQ, AWQ gemm and pack-quantized weights of 4 and 8 bits, or give the unquantized checkpoint",
        )
    return packing


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


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What config.json says of quantization, wherever it stands."""
    text, own = config.get("text_config"), config.get("quantization")
    if isinstance(own, dict) and "bits" in own and not config.get("quantization_config"):
        return {"quant_method": "mlx", **own}  # mlx_lm writes a key of its own
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not found:
        return None
    return found if isinstance(found, dict) else {"quant_method": str(found)}
