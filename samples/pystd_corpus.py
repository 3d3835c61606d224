"""The corpus of the sample checkpoint: the source of the Python standard library, its tokenizer and its documents.

A few whole modules, chosen by the hash of their path, are held out for evaluation: never in the training text, neither
themselves nor through a near copy.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import shutil
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, BOS_ID = "<|endoftext|>", 0
VOCAB_SIZE = 4096
STDLIB = Path(sysconfig.get_path("stdlib"))

# Left out of the corpus: third-party code, and generated tables that are data rather than source.
EXCLUDED = re.compile(r"(^|/)(site-packages|__pycache__|encodings|pydoc_data)/|lib2to3/tests/data/|_sysconfigdata")
TESTS = re.compile(r"(^|/)(test|tests|idle_test)/")
TOP_LEVEL = re.compile(r"^(async def|def|class|import|from)\b", re.MULTILINE)

HELDOUT_BYTES = 350_000
HELDOUT_FILE_BYTES = range(12_000, 45_000)
MAX_SHARED_LINES = 0.10  # of a held-out file's lines, in any other file
CALIBRATION_BYTES = 300_000


@dataclass(frozen=True)
class Corpus:
    """Source files by relative path: what the model learns from, and what it must never see."""

    library: dict[str, str]
    tests: dict[str, str]
    heldout: dict[str, str]


def distinctive_lines(text: str) -> set[str]:
    """The lines of a file that are long enough for a repetition elsewhere to mean a copy."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 30}


def path_hash(path: str) -> str:
    """A fixed pseudo-random order of the files."""
    return hashlib.sha256(path.encode()).hexdigest()


def read_corpus(root: Path) -> Corpus:
    """Read every source file below `root` and set the held-out modules apart."""
    files: dict[str, str] = {}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if EXCLUDED.search(path):
            continue
        try:
            text = file.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip():
            files[path] = text

    owners = Counter(line for text in files.values() for line in distinctive_lines(text))
    heldout: dict[str, str] = {}
    for path in sorted(files, key=path_hash):
        lines = distinctive_lines(files[path])
        shared = sum(owners[line] > 1 for line in lines)
        if TESTS.search(path) or shared > MAX_SHARED_LINES * len(lines):
            continue
        if len(files[path].encode()) not in HELDOUT_FILE_BYTES:
            continue
        heldout[path] = files[path]
        if sum(len(text.encode()) for text in heldout.values()) >= HELDOUT_BYTES:
            break

    kept = {path: text for path, text in files.items() if path not in heldout}
    return Corpus(
        library={path: text for path, text in kept.items() if not TESTS.search(path)},
        tests={path: text for path, text in kept.items() if TESTS.search(path)},
        heldout=heldout,
    )


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE: every text has an encoding, and decoding gives back its bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[BOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def passes(corpus: Corpus, rng: random.Random) -> Iterator[list[str]]:
    """Endless passes over the corpus in random order: all library files, and the tests by thirds in turn.

    One file in three is cut in two before a random top-level statement, so that the model also learns documents that
    open with a definition, as prompts do.
    """
    for turn in itertools.count():
        third = [text for path, text in corpus.tests.items() if int(path_hash(path), 16) % 3 == turn % 3]
        texts: list[str] = []
        for text in [*corpus.library.values(), *third]:
            starts = [match.start() for match in TOP_LEVEL.finditer(text)]
            cut = rng.choice(starts) if starts and rng.random() < 1 / 3 else 0
            texts += [part for part in (text[:cut], text[cut:]) if part]
        rng.shuffle(texts)
        yield texts


def save_texts(out: Path, corpus: Corpus, seed: int) -> None:
    """Write the held-out files, the calibration text and the licence of both."""
    shutil.rmtree(out / "heldout", ignore_errors=True)
    (out / "heldout").mkdir(parents=True)
    for path, text in corpus.heldout.items():
        (out / "heldout" / f"{path.replace('/', '.')}.txt").write_text(text, encoding="utf-8")

    texts = [text for text in corpus.library.values() if len(text) < HELDOUT_FILE_BYTES.stop]
    random.Random(seed).shuffle(texts)
    sizes = itertools.accumulate(len(text.encode()) for text in texts)
    count = sum(size <= CALIBRATION_BYTES for size in sizes)
    (out / "calib.txt").write_text("\n".join(texts[:count]), encoding="utf-8")
    shutil.copy(STDLIB / "LICENSE.txt", out / "LICENSE.txt")


def save_tokenizer(out: Path, tokenizer: Tokenizer, context: int) -> None:
    """Write tokenizer.json and its configuration, under the class name that every transformers version knows."""
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": BOS,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
