"""Checkpoints of bitsandbytes: the values that bitsandbytes itself reads from its files, and refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from icc.compiler.errors import TensorError, UnsupportedModel
from icc.compiler.frontend.source.bitsandbytes import with_states
from icc.compiler.frontend.source.checkpoint import open_checkpoint
from icc.compiler.frontend.source.packing import packing_of
from icc.compiler.frontend.source.packings import BitsandbytesPacking
from icc.compiler.weights.handles import Constant, Weight
from safetensors import safe_open
from safetensors.torch import save_file

FILE = Path(__file__).with_name("data") / "bitsandbytes.safetensors"  # benchmarks/record_bitsandbytes.py
FORMS = {
    "nf4-nested.weight": "nf4_f32g64[128, 192]",
    "fp4-nested.weight": "fp4_f32g32[24, 96]",  # blocks of 64 in rows of 96
    "nf4-plain.weight": "nf4_f32g128[24, 256]",
    "fp4-plain.weight": "fp4_f32g64[16, 64]",
}


@pytest.fixture
def tensors() -> dict[str, Weight]:
    with safe_open(FILE, "pt") as file:
        return {name: Constant(file.get_tensor(name)) for name in file.keys()}


def test_values_are_those_of_bitsandbytes_to_the_last_bit(tensors: dict[str, Weight]) -> None:
    with safe_open(FILE, "pt") as file:
        expected = json.loads(file.metadata()["sha256"])
    found = with_states(tensors)
    assert set(found) == {*FORMS, "int8.weight"}
    for name, form in FORMS.items():
        assert found[name].describe() == form
        assert hashlib.sha256(found[name].load().numpy().tobytes()).hexdigest() == expected[name], name


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_codes_in_words_that_are_called_floats(
    storage: torch.dtype, tensors: dict[str, Weight], tmp_path: Path
) -> None:
    """bnb_4bit_quant_storage: the same bytes, some of which are NaN in that type."""
    whole = with_states(tensors)[NF4].load()
    codes = tensors[NF4].load().reshape(-1).view(storage).unsqueeze(1)
    assert torch.equal(with_states(changed(tensors, NF4, codes))[NF4].load(), whole)
    save_file({NF4: codes}, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path)[NF4]
    assert torch.equal(with_states({**tensors, NF4: stored})[NF4].load(), whole)


def test_rows_of_integers(tensors: dict[str, Weight]) -> None:
    whole = tensors["int8.weight"].load() * tensors["int8.SCB"].load().unsqueeze(1) / 127
    weight = with_states(tensors)["int8.weight"]
    assert weight.describe() == "zq8_f32g96[24, 96]"
    torch.testing.assert_close(weight.load(), whole, rtol=2**-22, atol=0)


def changed(tensors: dict[str, Weight], name: str, value: torch.Tensor | None) -> dict[str, Weight]:
    rest = {key: weight for key, weight in tensors.items() if key != name}
    return rest if value is None else {**rest, name: Constant(value)}


def state(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


GOOD = {"quant_type": "nf4", "blocksize": 64, "shape": [128, 192], "nested_blocksize": 256, "nested_offset": 0.1}
NF4 = "nf4-nested.weight"
STATE = f"{NF4}.quant_state.bitsandbytes__nf4"
DAMAGED = [
    (NF4, None, "is missing from the checkpoint"),
    (STATE, None, "is missing from the checkpoint"),
    (NF4, torch.zeros(5, 1, dtype=torch.uint8), "has 5 bytes for a 4-bit matrix"),
    (f"{NF4}.absmax", torch.zeros(3, dtype=torch.uint8), "has not the 384 scales"),
    (STATE, state("{"), "does not say how the matrix is stored"),
    (STATE, state(json.dumps(GOOD | {"shape": [10**12, 10**12]})), "has 12288 bytes for a 4-bit matrix"),
    (STATE, state(json.dumps(GOOD | {"blocksize": -64})), "says what cannot be"),
    (STATE, state(json.dumps(GOOD | {"nested_offset": "NaN"})), "says what cannot be"),
    (STATE, torch.zeros(1 << 20, dtype=torch.uint8), "is no text"),
    (f"{NF4}.nested_absmax", torch.zeros(1), "does not fit 384 scales"),
    (f"{NF4}.nested_absmax", torch.full((2,), torch.nan), "scales that are NaN"),
    ("int8.SCB", torch.zeros(3), "with 3 scales"),
]


@pytest.mark.parametrize(("name", "value", "words"), DAMAGED)
def test_damage_is_one_line(tensors: dict[str, Weight], name: str, value: torch.Tensor | None, words: str) -> None:
    with pytest.raises(TensorError, match=words):
        for weight in with_states(changed(tensors, name, value)).values():
            weight.load()


def test_what_is_refused_by_name(tensors: dict[str, Weight]) -> None:
    for name, value, words in (
        (f"{NF4}.quant_map", torch.linspace(-1, 1, 16), "has a table of its own, not that of nf4"),
        ("int8.weight_format", torch.tensor(1, dtype=torch.uint8), "in the order of a GPU's tiles"),
        (STATE, state(json.dumps(GOOD | {"shape": [3072, 8]})), "rows of 8 values in blocks of 64"),
    ):
        with pytest.raises(UnsupportedModel, match=words):
            with_states(changed(tensors, name, value))


def test_what_config_json_says(tmp_path: Path) -> None:
    for facts, bits in (({"load_in_4bit": True}, 4), ({"_load_in_8bit": True}, 8)):
        packing = packing_of({"quantization_config": {"quant_method": "bitsandbytes", **facts}}, tmp_path)
        assert packing == BitsandbytesPacking(bits)
