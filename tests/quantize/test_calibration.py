"""Calibration text: windows, the bundled default, and one clear line per mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from icc.compiler.calibration import DEFAULT_TEXT, load_calibration
from icc.compiler.errors import UsageError
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def test_windows_of_the_bundled_text(tokenizer: Path) -> None:
    found = load_calibration(None, tokenizer, 256, num_sequences=5, sequence_length=64)
    assert [len(s) for s in found.sequences] == [64] * 5 and not found.warning
    assert found == load_calibration(None, tokenizer, 256, num_sequences=5, sequence_length=64)
    assert 200_000 < DEFAULT_TEXT.stat().st_size < 300_000
    assert "PSF License" in DEFAULT_TEXT.read_text(encoding="utf-8")[:200]


def test_short_text_gives_fewer_windows(tokenizer: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("x = 1\n" * 20)
    found = load_calibration(text, tokenizer, 256, 8, 50)
    assert [len(s) for s in found.sequences] == [50, 50] and "100 tokens only" in found.warning


def test_without_a_tokenizer() -> None:
    found = load_calibration(None, None, 30, num_sequences=3, sequence_length=8, seed=1)
    assert "random token ids" in found.warning
    assert all(0 <= i < 30 for s in found.sequences for i in s) and len(found.sequences) == 3
    assert found == load_calibration(None, None, 30, num_sequences=3, sequence_length=8, seed=1)


def test_mistakes(tokenizer: Path, tmp_path: Path) -> None:
    binary = tmp_path / "b.txt"
    binary.write_bytes(b"abc\xff\xfe")
    short = tmp_path / "s.txt"
    short.write_text("hello")
    for path, message in (
        (tmp_path / "none.txt", "no such file"),
        (binary, r"is not UTF-8 \(byte 3\)"),
        (short, "is too short: 5 tokens, 64 are needed"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(UsageError, match=message) as found:
            load_calibration(path, tokenizer, 256, 2, 64)
        assert "\n" not in str(found.value)
