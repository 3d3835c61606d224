"""An adapter that names another base than the model it is used with: one warning, and it is used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
from gguf_adapters import convert
from icc.compiler.driver import compile_engine
from icc.compiler.options import CompileOptions
from icc.compiler.progress import Reporter
from icc.runtime.adapters.adapter import Adapter
from icc.runtime.adapters.bases import other_base, published_name
from peft_models import save_adapter

HUB = Path("/home/me/.cache/huggingface/hub/models--meta-llama--Llama-3.2-1B/snapshots/4e20de36")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (HUB, "meta-llama/Llama-3.2-1B"),
        (Path("/models/Llama-3.2-1B"), "Llama-3.2-1B"),
        (Path("/models/Llama-3.2-1B-Q4_K_M.gguf"), "Llama-3.2-1B-Q4_K_M"),
    ],
)
def test_what_publishers_call_a_model(model: Path, name: str) -> None:
    assert published_name(model) == name
    for same in ("meta-llama/Llama-3.2-1B", "unsloth/llama-3.2-1b-bnb-4bit", "/data/Llama-3.2-1B/", ""):
        assert other_base(Adapter(Path("a"), b"", same, (), {}), name) == ""
    for other in ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B", "/data/checkpoint-500"):
        told = other_base(Adapter(Path("a"), b"", other, (), {}), name)
        assert told == f"a was trained for {other}, this is {name}: its shapes fit, its answers may not"


def named(adapter: Path, base: str) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))
    return adapter


def told_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "icc.adapters"]


def test_it_is_told_where_it_is_used(
    engine: Callable[..., Path], model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At run time the log has the warning, for both file formats; when the adapter is merged, the compile reports
    it."""
    adapter = save_adapter(model("llama"), tmp_path / "adapter", r=4, target_modules=["q_proj"])
    line = "was trained for org/other, this is model: its shapes fit, its answers may not"
    file = convert(adapter, model("llama"), tmp_path / "a.gguf", "llama", **{"general.base_model.0.name": "org/other"})
    with icc.load(engine("llama", adapters="2x16")) as llm, caplog.at_level(logging.WARNING, "icc.adapters"):
        llm.load_adapter("one", named(adapter, "org/other"))
        llm.load_adapter("two", file)
        assert told_by(caplog) == [
            f"adapter one: {adapter} {line}", f"adapter two: {file} {line}"
        ]  # fmt: skip
        llm.load_adapter("three", named(adapter, "org/model"))
        assert len(told_by(caplog)) == 2
        assert llm.adapters is not None and llm.adapters.names == ["one", "two", "three"]

    told: list[str] = []

    class Told(Reporter):
        def warn(self, message: str) -> None:
            told.append(message)

    options: Any = {"max_seq_len": 64, "lora": named(adapter, "org/other")}
    compile_engine(CompileOptions(model("llama"), tmp_path / "engine", "native", **options), Told())
    assert [one for one in told if "trained for" in one] == [f"{adapter} {line}"]


def test_a_name_that_would_steer_a_terminal_is_shown_by_its_characters() -> None:
    told = other_base(Adapter(Path("a"), b"", "evil\x1b[2J\x00", (), {}), "good")
    assert told.isprintable() and "'evil\\x1b[2J\\x00'" in told
