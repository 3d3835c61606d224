"""LoadOptions: one list of fields, checked early, and the same in all places that load an engine."""

from __future__ import annotations

import inspect
import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import icc
import pytest
from icc.runtime.cli.group import command
from icc.runtime.cli.load import loads
from icc.runtime.errors import UsageError
from icc.runtime.format.manifest import FORMAT_VERSION
from icc.runtime.options import LoadOptions

OPTIONS: dict[str, Any] = {
    "threads": 2, "cores": "0-1,3", "device": 1, "target": "h100",
    "isa": "avx2", "verify": False, "verify_answers": True, "kv_bytes": 1 << 40, "swap_bytes": 0,
    "spec": "ngram", "spec_accept": "typical:0.1,0.2",
}  # fmt: skip


def test_load_takes_the_fields() -> None:
    parameters = inspect.signature(icc.load).parameters
    assert list(parameters) == [field.name for field in fields(LoadOptions)]
    assert [p.kind for p in parameters.values()][1:] == [inspect.Parameter.KEYWORD_ONLY] * 13
    assert [p.default for p in parameters.values()][1:] == [
        *[None] * 5, True, None, False, None, None, None, "lossless", None,
    ]  # fmt: skip


def test_they_reach_the_engine_process_as_they_are() -> None:
    options = LoadOptions(Path("a/model.engine"), **OPTIONS)
    assert set(OPTIONS) == {field.name for field in fields(LoadOptions)} - {"path", "require_signature", "adapters"}
    with_adapters = LoadOptions("x", adapters={"sql": Path("a/b")})
    assert with_adapters.adapters == {"sql": "a/b"}
    signed = LoadOptions("x", require_signature="release.pub")  # excludes verify=False
    for one in (options, signed, with_adapters):
        assert LoadOptions.from_json(one.to_json()) == one
    assert options.path == "a/model.engine" and options.acceptance is not None
    with pytest.raises(FrozenInstanceError):
        options.threads = 3  # type: ignore[misc]


def test_a_command_without_options_has_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = str(tmp_path)
    entry = {"digest": "", "files": {"program.json": "h100/program.json"}}
    whole = {"format_version": FORMAT_VERSION, "icc_version": "0", "targets": {"h100": entry}}
    (tmp_path / "engine.json").write_text(json.dumps({"format_version": FORMAT_VERSION}))  # only this is read
    found: list[LoadOptions] = []
    reader = command("read")(loads(lambda load: found.append(load)))
    given = [engine, "--threads=2", "--cores=0-1,3", "--device=1", "--isa=avx2", "--no-verify", "--verify-answers"]
    given += [f"--kv-mib={1 << 20}", "--swap-gib=0", "--spec=ngram"]
    reader([engine], standalone_mode=False)
    (tmp_path / "engine.json").write_text(json.dumps(whole))
    reader([*given, "--target=h100", "--spec-accept=typical:0.1,0.2"], standalone_mode=False)
    assert found == [LoadOptions(engine), LoadOptions(f"{engine}/h100", **{**OPTIONS, "target": None})]
    assert capsys.readouterr().err.count("lossy") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0), ("threads", True), ("threads", "2"), ("kv_bytes", -1), ("kv_bytes", 1.5), ("swap_bytes", -1),
        ("device", -1), ("device", "0"), ("cores", 1), ("cores", "3-1"), ("isa", 3), ("spec", 3), ("spec_accept", None),
        ("spec_accept", "greedy"), ("verify", 1), ("verify_answers", 1),
    ],
)  # fmt: skip
def test_what_no_engine_takes_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name.replace("_", "[-_]")):
        LoadOptions("x", **{name: value})  # type: ignore[arg-type]
