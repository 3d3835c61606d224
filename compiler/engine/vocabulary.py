"""Writes vocabulary.bin (see runtime/format/vocabulary.py) for byte-pair tokenizers, and compares its tokens with
theirs."""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
from tokenizers import Tokenizer

from ...runtime.first_text import FirstText
from ...runtime.format.vocabulary import Vocabulary, VocabularyFacts, encode_vocabulary

_OPTIONS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
_SAMPLES = (
    "The capital of France is Paris.",
    "def f(x):\n    return {'a': [x, 12.5]}\n\n\n",
    " Grüße, \u0301e, привет, こんにちは, 你好 😀\ttabs  and   blanks ",
)
_SLOTS = 3, 2  # slots of the hash table, per number of tokens


def compact(raw: bytes) -> bytes:
    """tokenizer.json without whitespace, and with merges as strings if no part has a space: it is read in half the
    time."""
    facts = json.loads(raw)
    merges = facts.get("model", {}).get("merges")
    if merges and not any(" " in part for merge in merges if isinstance(merge, list) for part in merge):
        facts["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode()


def lowering(raw: bytes) -> bytes:
    """tokenizer.json with a lower-case normalizer put first, if it has none."""
    facts = json.loads(raw)
    own = facts.get("normalizer")
    own = [] if own is None else own["normalizers"] if own["type"] == "Sequence" else [own]
    if not any(one["type"] == "Lowercase" or one.get("lowercase") for one in own):
        facts["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *own]}
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode()


def make_vocabulary(raw: bytes) -> bytes | None:
    """The vocabulary.bin of a tokenizer.json; None if the runtime must read tokenizer.json itself, because it may find
    tokens that are not substrings of the text."""
    facts = json.loads(raw)
    if not _fits(facts):
        return None
    model = facts["model"]
    whole = Tokenizer.from_buffer(raw)
    ids: dict[str, int] = model["vocab"]
    added: dict[str, int] = {token["content"]: token["id"] for token in facts["added_tokens"]}
    count = max([*ids.values(), *added.values()], default=-1) + 1
    texts = [(whole.id_to_token(token) or "").encode() for token in range(count)]
    if any(texts[token] != text.encode() for text, token in ids.items()):  # an added token has its id
        return None
    added |= {texts[token].decode(): token for token in added.values()}  # as the normalizer writes them
    merges = _merges(model["merges"], ids)
    order = np.argsort(merges[:, 0], kind="stable")  # sorted by the token that they make, with ranks
    ranked = np.column_stack([order, merges[order, 1:]])
    fallback = [ids[byte] for byte in (f"<0x{value:02X}>" for value in range(256)) if byte in ids]
    unknown = [ids[model["unk_token"]]] if model.get("unk_token") in ids else []
    frame = facts | {"model": {"type": "BPE", "vocab": added, "merges": []}}
    found = VocabularyFacts(
        frame=msgspec.Raw(json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode()),
        tokens=count,
        slots=max(_SLOTS[0] * len(ids) // _SLOTS[1], count + 1),
        merges=len(merges),
        longest=max(map(len, ids), default=1),
        always=sorted({*fallback, *unknown}),
        options={name: model[name] for name in _OPTIONS if model.get(name) is not None},
    )
    ends = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    firsts = np.searchsorted(merges[order, 0], np.arange(count + 1))
    tables = (ends, _slots(ids, found.slots), firsts, ranked)
    made = encode_vocabulary(found, [table.astype("<u4").tobytes() for table in tables], b"".join(texts))
    return made if _agrees(made, whole) else None


def _agrees(made: bytes, whole: Tokenizer) -> bool:
    """Whether vocabulary.bin encodes a few texts as the whole tokenizer does, so that tokenizer features that this file
    does not know are found at the compile."""
    first = FirstText(Vocabulary(made))
    every = range(0, whole.get_vocab_size(), whole.get_vocab_size() // 64 + 1)
    texts = (*_SAMPLES, whole.decode(list(every), skip_special_tokens=False), whole.decode(list(every)))
    found = [(first.encode(text, True), whole.encode(text).ids) for text in texts]
    return all(ids in (None, wanted) for ids, wanted in found)


def _fits(facts: dict[str, Any]) -> bool:
    """Whether every token of a text is a substring of it."""
    model = facts.get("model", {})
    if model.get("type") != "BPE" or not model.get("vocab") or "" in model["vocab"] or model.get("dropout"):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    # with ignore_merges whole words are looked up; an added token that the model lacks must not be found so
    own = model["vocab"].keys()
    return not model.get("ignore_merges") or all(
        token["content"] in own or not token["single_word"] for token in facts["added_tokens"]
    )


def _merges(given: list[Any], ids: dict[str, int]) -> np.ndarray:
    """[merges, 3], by rank: the id of the token that a merge makes, and the ids of its two parts."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in given)
    rows = [(ids[left + right], ids[left], ids[right]) for left, right in pairs]
    return np.array(rows, np.int64).reshape(-1, 3)


def _slots(ids: dict[str, int], count: int) -> np.ndarray:
    """The hash table of texts: a text's id + 1 is in the slot of its hash or the next free slot after it; 0 is free."""
    slots = np.zeros(count, np.int64)
    for text, token in ids.items():
        at = crc32(text.encode()) % count
        while slots[at]:
            at = (at + 1) % count
        slots[at] = token + 1
    return slots
