"""Reading adapters: all forms that peft writes; damaged or unsupported ones are refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from icc.runtime.adapters.config import KNOWN_FIELDS, LoraConfig
from icc.runtime.adapters.reader import read_adapter
from icc.runtime.adapters.tensors import MAX_TENSORS
from icc.runtime.errors import AdapterError
from peft_models import save_adapter
from safetensors.torch import load_file, save_file

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader") / "plain"
    return save_adapter(model("llama"), folder, r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def own(plain: Path, tmp_path: Path) -> Path:
    """A copy of the adapter, to be damaged."""
    return Path(shutil.copytree(plain, tmp_path / "adapter"))


def configure(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_every_field_of_peft_is_known() -> None:
    from peft import LoraConfig as PeftConfig

    defaults = PeftConfig().to_dict()
    assert set(defaults) <= KNOWN_FIELDS, set(defaults) - KNOWN_FIELDS
    ours = LoraConfig()
    for name in LoraConfig.__struct_fields__:
        if name != "peft_type":
            assert (getattr(ours, name) or None) == (defaults[name] or None), name


def test_low_rank_changes(plain: Path) -> None:
    adapter = read_adapter(plain)
    assert sorted(adapter.changes) == [
        f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in (0, 1) for kind in "qv"
    ]
    change = adapter.changes["model.layers.0.self_attn.q_proj.weight"].low_rank
    assert change is not None and change.scale == 1.5 and adapter.rank == change.rank == 4
    stored = load_file(plain / "adapter_model.safetensors")
    assert np.array_equal(change.a, stored[f"{Q}.lora_A.weight"].numpy())
    assert np.array_equal(change.b, stored[f"{Q}.lora_B.weight"].numpy())


def test_names_and_types_of_other_versions(own: Path, plain: Path) -> None:
    """Keys with the adapter's name in them, and half precision."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name).to(torch.bfloat16)

    retensor(own, rename)
    found, expected = read_adapter(own), read_adapter(plain)
    assert set(found.changes) == set(expected.changes) and found.digest != expected.digest
    for name, change in found.changes.items():
        wanted = expected.changes[name].low_rank
        assert change.low_rank is not None and wanted is not None
        assert np.abs(change.low_rank.a - wanted.a).max() < 1e-3


def test_everything_else_that_changes(model: Callable[[str], Path], tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj", "embed_tokens"], "r": 4, "use_dora": False, "lora_bias": False}
    found = read_adapter(save_adapter(model("llama"), tmp_path / "table", **options)).changes
    table = found["model.embed_tokens.weight"]
    assert table.low_rank is not None and table.low_rank.b.shape == (120, 4) and table.low_rank.a.shape == (4, 64)
    assert table.whole is not None and table.whole.shape == (120, 64)

    options = {"target_modules": ["v_proj"], "lora_bias": True, "r": 4, "lora_alpha": 2}
    found = read_adapter(save_adapter(model("llama"), tmp_path / "bias", **options)).changes
    bias = found["model.layers.1.self_attn.v_proj.weight"].bias
    assert bias is not None and bias.shape == (32,)

    options = {"target_modules": ["q_proj"], "use_dora": True, "r": 4}
    options |= {"modules_to_save": ["lm_head"], "trainable_token_indices": {"embed_tokens": [3, 50]}}
    found = read_adapter(save_adapter(model("llama"), tmp_path / "all", **options)).changes
    change = found["model.layers.0.self_attn.q_proj.weight"]
    assert change.magnitude is not None and change.magnitude.shape == (64,)
    rows = found["model.embed_tokens.weight"].rows
    assert rows is not None and rows.ids == (3, 50) and rows.values.shape == (2, 64)
    whole = found["lm_head.weight"].whole
    assert whole is not None and whole.shape == (120, 64)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another tuner": ({"peft_type": "IA3"}, r"peft_type is 'IA3', not 'LORA'.*"),
    "no tuner": ({"peft_type": None}, "peft_type is None"),
    "a field of tomorrow": ({"use_tlora": True}, "does not know the field 'use_tlora', which is True"),
    "a field that would count": ({"use_qalora": True}, "use_qalora is True, which icc does not do"),
    "layers twice": ({"layer_replication": [[0, 1]]}, r"layer_replication is \[\[0, 1\]\]"),
    "random numbers": ({"init_lora_weights": "pissa_niter_4"}, "found with random numbers .* not in the adapter"),
    "inputs": ({"init_lora_weights": "corda", "corda_config": {"corda_method": "kpm"}}, "what a text said .*CorDA"),
    "gradients": ({"init_lora_weights": "lora_ga"}, r"changed first, by gradients of a text \(LoRA-GA\)"),
    "a beginning of tomorrow": ({"init_lora_weights": "other"}, "'other': it was trained on a base that was changed"),
    "LoftQ of 3 bits": (
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 3, "loftq_iter": 1}},
        "says 3 bits and 1 iter",
    ),
    "LoftQ without end": (
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_iter": 1 << 40}},
        "4 bits and 1099511627776 iterations",
    ),
    "rank 0": ({"r": 0}, "a rank is less than 1"),
    "another rank": ({"r": 8}, "has rank 4, adapter_config.json says 8"),
    "a rank that is text": ({"r": "many"}, "Expected `int`"),
    "no regular expression": ({"rank_pattern": {"(": 4}}, "is no regular expression"),
    "DoRA without magnitudes": ({"use_dora": True}, "has no magnitude"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_is_refused(case: str, own: Path) -> None:
    fields, message = CONFIGS[case]
    configure(own, **fields)
    with pytest.raises(AdapterError, match=message):
        read_adapter(own)


def test_unknown_fields_at_rest_are_no_reason(own: Path) -> None:
    configure(own, use_tlora=False, tlora_config=None, shadows=[])
    assert len(read_adapter(own).changes) == 4


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "an unknown part": (lambda t: t.update({f"{Q}.lora_C.weight": torch.zeros(4)}), "lora_C.weight' is not used"),
    "half a product": (lambda t: t.pop(f"{Q}.lora_A.weight"), "lora_B.weight' is not used: there is no lora_A"),
    "no product": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(3, 64)}), "which is no product"),
    "a vector": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(64)}), "which is no product"),
    "a bias that is not": (lambda t: t.update({f"{Q}.lora_B.bias": torch.zeros(64)}), "the adapter has no bias"),
    "a magnitude that is not": (
        lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(64)}), "does not use DoRA",
    ),
    "not a number": (lambda t: t[f"{Q}.lora_A.weight"].fill_(float("nan")), "not finite"),
    "infinite": (lambda t: t[f"{Q}.lora_A.weight"].fill_(float("inf")), "not finite"),
    "integers": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)}), "of type I8"),
    "a path": (lambda t: t.update({"base_model.model.../../etc/x.weight": torch.zeros(4)}), "is not used"),
    "nothing": (lambda t: t.clear(), "changes nothing"),
    "tokens without ids": (
        lambda t: t.update({"base_model.model.e.token_adapter.trainable_tokens_delta": torch.zeros(2, 4)}),
        "trainable_token_indices has 0 ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_refused(case: str, own: Path) -> None:
    change, message = TENSORS[case]
    retensor(own, change)
    with pytest.raises(AdapterError, match=message):
        read_adapter(own)


def test_parameters_in_an_order_that_is_not_known(own: Path) -> None:
    """PEFT nests the parameters of one module in the order in which it wrapped them, which its files do not record."""
    configure(own, target_parameters=["self_attn.q_proj.first", "self_attn.q_proj.second"])
    with pytest.raises(AdapterError, match=r"does not know in what order PEFT has nested 'first'"):
        read_adapter(own)


def header(entries: Any, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header is longer"),
    "a header past the end": ((1 << 60).to_bytes(8, "little") + b"{}", "header is longer"),
    "no JSON": (header(b"{{{"), "header is not valid"),
    "nested without end": (header(b"[" * 100_000), "header is not valid"),
    "outside": (header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"1234"), "not 16 bytes of it"),
    "turned around": (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}, b"12345678"), "not 4 "),
    "a negative size": (header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}), "has the shape"),
    "too large to count": (
        header({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]}}, b"1234"), "is not",
    ),
    "a million tensors": (
        header({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(MAX_TENSORS + 1)}),
        f"more than {MAX_TENSORS}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_damaged(case: str, own: Path) -> None:
    raw, message = FILES[case]
    (own / "adapter_model.safetensors").write_bytes(raw)
    with pytest.raises(AdapterError, match=message):
        read_adapter(own)


def test_what_is_no_adapter(own: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is no directory with an adapter"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(AdapterError, match="cannot read"):
        read_adapter(tmp_path)
    (own / "adapter_model.safetensors").rename(own / "adapter_model.bin")
    with pytest.raises(AdapterError, match="a pickle, which can run programs"):
        read_adapter(own)
    (own / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="is damaged"):
        read_adapter(own)
