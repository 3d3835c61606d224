"""The files of a checkpoint for texts, with a complete tokenizer.json.

Older checkpoints have vocab.json and merges.txt, or a SentencePiece model, which transformers converts.
tokenizer_config.json may name added tokens that tokenizer.json lacks. Its `add_bos_token` and `add_eos_token` are
ignored beside a tokenizer.json, as in transformers 5: that file defines the tokens around a text.
"""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .identify import read_object

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
# files of other libraries; the first that exists is read
OTHERS = (
    "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tekken.json", "vocab.json", "vocab.txt",
)  # fmt: skip
_WRITTEN = (TOKENIZER, CONFIG, "special_tokens_map.json", "chat_template.jinja")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TextFiles:
    """path: a directory with the files of a checkpoint besides its weights, including tokenizer.json if one could be
    made. It may be temporary, and is then deleted with this object. told: a message for the user; "" for none."""

    path: Path
    told: str = ""
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)


def other_tokenizer(folder: Path) -> str:
    """The name of a tokenizer's file other than tokenizer.json; "" if the directory has none."""
    return next((name for name in OTHERS if (folder / name).is_file()), "")


def text_files(folder: Path) -> TextFiles:
    """The directory itself if its tokenizer.json is complete; else one with links to its files and a complete
    tokenizer.json. CheckpointError if tokenizer.json is damaged."""
    if (folder / TOKENIZER).is_file():
        config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        whole = _completed(folder / TOKENIZER, config)
        return TextFiles(folder) if whole is None else _beside(folder, {TOKENIZER: whole})
    if not (other := other_tokenizer(folder)):
        return TextFiles(folder)
    made, reason = _converted(folder, other)
    if reason:
        return TextFiles(folder, f"no {TOKENIZER} can be made of {other}, the engine takes token ids only: {reason}")
    return _beside(folder, made)


def _beside(folder: Path, made: dict[str, bytes]) -> TextFiles:
    """A temporary directory with these files, and with links to all other entries of `folder`."""
    temporary = tempfile.TemporaryDirectory(prefix="icc-texts-")
    path = Path(temporary.name)
    for name, content in made.items():
        (path / name).write_bytes(content)
    for entry in folder.iterdir():
        if entry.name not in made:
            (path / entry.name).symlink_to(entry.resolve())
    return TextFiles(path, "", temporary)


def _converted(folder: Path, other: str) -> tuple[dict[str, bytes], str]:
    """The files that transformers writes for another library's tokenizer; {} and the reason if it cannot."""
    from transformers import AutoTokenizer
    from transformers import logging as their_logging

    if other.endswith(".model") and find_spec("sentencepiece") is None:
        return {}, "it needs the package sentencepiece (pip install sentencepiece protobuf)"
    before = their_logging.get_verbosity()
    their_logging.set_verbosity(logging.CRITICAL)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer.save_pretrained(scratch)
            found = {name: file.read_bytes() for name in _WRITTEN if (file := Path(scratch) / name).is_file()}
    except MemoryError:
        raise
    except Exception as error:  # any error of transformers about the file
        return {}, " ".join(str(error).split())[:200] or type(error).__name__
    finally:
        their_logging.set_verbosity(before)
    if TOKENIZER not in found:
        return {}, f"transformers' {type(tokenizer).__name__} has none"
    return {name: content for name, content in found.items() if name == TOKENIZER or not (folder / name).is_file()}, ""


def _completed(file: Path, config: dict[str, Any]) -> bytes | None:
    """A tokenizer.json completed from tokenizer_config.json; None if nothing is to be added."""
    stated = config.get("added_tokens_decoder")
    if not isinstance(stated, dict) or not stated:
        return None
    facts = read_object(file)
    try:
        more = _with_added(facts, stated)
    except MemoryError:
        raise
    except Exception:  # no tokenizer: its reader reports the error
        return None
    return json.dumps(facts, ensure_ascii=False).encode() if more else None


def _with_added(facts: dict[str, Any], stated: dict[str, Any]) -> bool:
    """Add the tokens `stated` by id that a tokenizer.json lacks, and return whether there were any. A token whose id is
    taken or leaves a gap is skipped: the tokenizers library assigns ids in order."""
    added = facts.get("added_tokens")
    if not isinstance(added, list):
        return False
    known, ids = {token["content"] for token in added}, _ids(facts)
    end, before = max(ids.values(), default=-1) + 1, len(added)
    for number, key in sorted((int(key), key) for key in stated if key.isdecimal()):
        token = stated[key]
        content = _text(token) if isinstance(token, dict) else ""
        if content and content not in known and ids.get(content, end) == number:
            special = token.get("special") is True
            flags = {flag: token.get(flag) is True for flag in _FLAGS}
            flags["normalized"] = token.get("normalized", not special) is True
            added.append({"id": number, "content": content, **flags})
            known.add(content)
            end = max(end, number + 1)
    added.sort(key=lambda token: token["id"])
    return len(added) > before


def _ids(facts: dict[str, Any]) -> dict[str, int]:
    """The ids of all tokens of a tokenizer.json."""
    vocab = facts["model"]["vocab"]
    own = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    return {**own, **{token["content"]: token["id"] for token in facts["added_tokens"]}}


def _text(token: Any) -> str:
    """The text of a token, given as a string or as an object with `content`; "" for anything else."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""
