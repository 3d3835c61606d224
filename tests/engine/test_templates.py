"""The chat templates of a checkpoint are those of its engine."""

from __future__ import annotations

from pathlib import Path

from icc.compiler.engine.directory import copy_tokenizer
from icc.runtime.templates.source import read_template


def test_named_templates_come_along(tmp_path: Path) -> None:
    model, stage = tmp_path / "model", tmp_path / "stage"
    (model / "additional_chat_templates").mkdir(parents=True)
    stage.mkdir()
    files = {"tokenizer.json": "{}", "chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "T"}
    for name, text in files.items():
        (model / name).write_text(text)
    folder = copy_tokenizer(stage, model)
    assert folder is not None
    copied = {str(file.relative_to(stage / folder)): file for file in (stage / folder).rglob("*") if file.is_file()}
    found = read_template(lambda name: copied[name].read_bytes() if name in copied else None, copied)
    assert (found.text, found.named) == ("D", {"tool_use": "T"})


def test_the_template_of_a_processor_comes_along(tmp_path: Path) -> None:
    """Models that take images may have it in no other file; if another file has one, that is used."""
    model, stage = tmp_path / "model", tmp_path / "stage"
    model.mkdir()
    stage.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.json").write_text('{"chat_template": "P"}')
    folder = copy_tokenizer(stage, model)
    assert folder is not None
    files = {file.name: file.read_bytes() for file in (stage / folder).iterdir()}
    assert read_template(files.get, files).text == "P"
    assert read_template((files | {"chat_template.jinja": b"D"}).get).text == "D"
    assert read_template((files | {"tokenizer_config.json": b'{"chat_template": "C"}'}).get).text == "C"
