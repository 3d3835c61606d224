"""Writes the files of an engine. Nothing here depends on time or place, so equal inputs give equal bytes."""

from __future__ import annotations

import contextlib
import functools
import json
import marshal
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from importlib.metadata import distribution
from importlib.util import MAGIC_NUMBER, cache_from_source, find_spec, source_hash
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from ...runtime.format.canaries import CANARIES_FILE, Canaries
from ...runtime.format.digest import encode_sealed
from ...runtime.format.forms import FORMS_FILE, CompiledForm, CompiledForms
from ...runtime.format.manifest import PIECE, TEMPLATE_DIR, FileEntry, Manifest, delta_file, weights_file
from ...runtime.format.program import Program
from ...runtime.format.prompts import PROMPTS_FILE, CompiledPrompts
from ...runtime.format.vocabulary import VOCABULARY_FILE
from ..program.builder import WeightSource
from ..weights.shards import LastParts, of_rank
from .digests import file_entry, library_digest
from .earlier import EarlierEngine
from .vocabulary import compact, lowering, make_vocabulary

Progress = Callable[[str, int, int], None]
Pack = Callable[[WeightSource], np.ndarray]
RUNTIME_DIR = Path(__file__).resolve().parents[2] / "runtime"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def write_weights(
    stage: Path,
    program: Program,
    sources: dict[str, WeightSource],
    pack: Pack,
    progress: Progress,
    parts: int = 1,
    held: Sequence[Set[str]] = (),
) -> None:
    """weights.safetensors: every weight packed as 64-byte aligned bytes, one at a time in memory; one file per rank.
    parts: how many ranks share each weight. held: for each pipeline stage, which has `parts` ranks, the names of its
    weights; empty for one stage."""
    count = parts * max(len(held), 1)
    with contextlib.ExitStack() as open_files:
        files = [open_files.enter_context((stage / weights_file(rank)).open("wb")) for rank in range(count)]
        for rank, file in enumerate(files):
            own_names = held[rank // parts] if held else program.stored.keys()
            file.write(weights_header({name: w.nbytes for name, w in program.stored.items() if name in own_names}))
        for rank, _, packed in _packed(program, sources, pack, progress, parts, held):
            files[rank].write(packed.data)
        for file in files:
            file.flush()
            os.fsync(file.fileno())


def write_delta(
    stage: Path,
    program: Program,
    sources: dict[str, WeightSource],
    pack: Pack,
    progress: Progress,
    base: EarlierEngine,
    parts: int = 1,
    held: Sequence[Set[str]] = (),
) -> None:
    """delta.safetensors: the weights whose bytes the base does not have; one file per rank, as `write_weights` has
    them."""
    count = parts * max(len(held), 1)
    own: list[dict[str, int]] = [{} for _ in range(count)]
    with contextlib.ExitStack() as open_files:
        raw = [open_files.enter_context(tempfile.TemporaryFile(dir=stage)) for _ in range(count)]
        for rank, name, packed in _packed(program, sources, pack, progress, parts, held):
            if not base.has(name, packed, rank):
                own[rank][name] = packed.nbytes
                raw[rank].write(packed.data)
        for rank, content in enumerate(raw):
            content.seek(0)
            with (stage / delta_file(rank)).open("wb") as file:
                file.write(weights_header(own[rank]))
                shutil.copyfileobj(content, file, PIECE)
                file.flush()
                os.fsync(file.fileno())


def _packed(
    program: Program,
    sources: dict[str, WeightSource],
    pack: Pack,
    progress: Progress,
    parts: int,
    held: Sequence[Set[str]],
) -> Iterator[tuple[int, str, np.ndarray]]:
    """(rank, name, bytes), the ranks of a weight one after the other: they have parts of the same values."""
    written, last = {name: source for name, source in sources.items() if name in program.stored}, LastParts()
    if parts > 1:
        written = {name: replace(one, handle=of_rank(one.handle, 0, last)) for name, one in written.items()}
    done, total = 0, sum(prod(source.handle.shape) for source in written.values())
    for name, source in written.items():
        progress(name, done, total)
        packed = pack(source)
        assert packed.nbytes == program.weights[name].nbytes, f"{name}: {packed.nbytes} bytes packed"
        stages = [stage for stage, names in enumerate(held or [program.stored]) if name in names]
        for part in range(parts):
            handle = of_rank(source.handle, part, last)
            own = packed if handle is source.handle else pack(replace(source, handle=handle))
            for stage in stages:
                yield stage * parts + part, name, own
        done += prod(source.handle.shape)


def weights_header(sizes: Mapping[str, int]) -> bytes:
    """The header of a safetensors file with tensors of these sizes in bytes, in this order."""
    header: dict[str, object] = {}
    start = 0
    for name, nbytes in sizes.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def write_program(stage: Path, program: Program) -> None:
    """program.json."""
    (stage / "program.json").write_bytes(msgspec.json.format(msgspec.json.encode(program), indent=1) + b"\n")


def copy_tokenizer(stage: Path, model: Path, lower_case: bool = False) -> str | None:
    """Copy the tokenizer's files and return their folder; None if the checkpoint has no tokenizer.json. lower_case: the
    tokenizer lower-cases texts first."""
    if not (model / "tokenizer.json").is_file():
        return None
    (stage / "tokenizer").mkdir()
    for name in TOKENIZER_FILES:
        if (model / name).is_file():
            shutil.copyfile(model / name, stage / "tokenizer" / name)
    tokens = compact((model / "tokenizer.json").read_bytes())
    if lower_case:
        tokens = lowering(tokens)
    (stage / "tokenizer" / "tokenizer.json").write_bytes(tokens)
    if (tables := make_vocabulary(tokens)) is not None:
        (stage / "tokenizer" / VOCABULARY_FILE).write_bytes(tables)
    for template in sorted((model / TEMPLATE_DIR).glob("*.jinja")):
        (stage / "tokenizer" / TEMPLATE_DIR).mkdir(exist_ok=True)
        shutil.copyfile(template, stage / "tokenizer" / TEMPLATE_DIR / template.name)
    return "tokenizer"


def copy_runtime(stage: Path) -> None:
    """Copy icc.runtime, its __main__, and click, the one dependency that users of engines need not have installed."""

    def skip(folder: str, names: list[str]) -> list[str]:
        kinds = (".py", ".css", ".js")  # the last two belong to the report
        return [n for n in names if n in ("__pycache__", "server") or not (n.endswith(kinds) or "." not in n)]

    failed: list[OSError] = []

    def copy(source: str, target: str) -> None:
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            failed.append(error)
            raise

    try:
        shutil.copytree(RUNTIME_DIR, stage / "runtime", ignore=skip, copy_function=copy)
    except shutil.Error as error:  # which holds a line for every file, and no errno
        raise (failed or [error])[0] from None
    _copy_click(stage / "click")
    for source in (*(stage / "runtime").rglob("*.py"), *(stage / "click").glob("*.py")):
        _write_bytecode(source, source.relative_to(stage).as_posix())
    copy_main(stage)


def copy_main(stage: Path) -> None:
    """Copy `__main__.py`, which is all of the runtime that a delta has: it imports that of the base."""
    shutil.copyfile(RUNTIME_DIR / "embedded_main.py", stage / "__main__.py")


def _copy_click(target: Path) -> None:
    """Copy click, which parses command lines: pure Python, as installed here, with its license."""
    found = find_spec("click")
    assert found is not None and found.origin is not None
    target.mkdir()
    for source in Path(found.origin).parent.glob("*.py"):
        shutil.copyfile(source, target / source.name)
    installed = distribution("click")
    texts = (installed.read_text(name) for name in ("licenses/LICENSE.txt", "LICENSE.txt", "LICENSE.rst", "METADATA"))
    (target / "LICENSE.txt").write_text(next(text for text in texts if text))


def _write_bytecode(source: Path, name: str) -> None:
    """Write the bytecode that Python itself would put into `__pycache__`, so that starting an engine compiles nothing.

    Python uses it if its version is this one and the source still has the hash in the file (PEP 552). Version 2 of
    marshal, because the bytes of later versions depend on reference counts, and equal inputs must give equal bytes.
    """
    target = Path(cache_from_source(str(source), optimization=""))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(_bytecode(source.read_bytes(), name))


@functools.cache
def _bytecode(content: bytes, name: str) -> bytes:
    """The content of a .pyc file. Cached, because each engine that a process compiles needs the same files: 0.6 s of
    work."""
    code = marshal.dumps(compile(content, name, "exec", dont_inherit=True, optimize=0), 2)
    checked_hash = (0b11).to_bytes(4, "little")
    return MAGIC_NUMBER + checked_hash + source_hash(content) + code


def write_canaries(stage: Path, canaries: Canaries) -> str:
    """Write canaries.json and return its name."""
    (stage / CANARIES_FILE).write_bytes(msgspec.json.encode(canaries) + b"\n")
    return CANARIES_FILE


def write_prompts(stage: Path, manifest: Manifest, prompts: CompiledPrompts) -> Manifest:
    """Write prompts.json, and return the manifest with it and the files that it names."""
    (stage / PROMPTS_FILE).write_bytes(msgspec.json.encode(prompts) + b"\n")
    return add_files(stage, manifest, [PROMPTS_FILE, *(one.file for one in prompts.prompts if one.file)])


def add_files(stage: Path, manifest: Manifest, names: Sequence[str]) -> Manifest:
    """The manifest with entries for more files, which were written already."""
    files = {**manifest.files, **{name: file_entry(stage / name, None) for name in names}}
    return seal(stage, msgspec.structs.replace(manifest, files=dict(sorted(files.items()))))


def write_forms(stage: Path, forms: Sequence[CompiledForm]) -> None:
    """Write grammars.json, if there are any forms."""
    if forms:
        (stage / FORMS_FILE).write_bytes(msgspec.json.encode(CompiledForms(list(forms))) + b"\n")


def write_manifest(stage: Path, manifest: Manifest) -> Manifest:
    """Write engine.json with size and digests of every file written before it, and return it."""
    files: dict[str, FileEntry] = {}
    for path in sorted(p for p in stage.rglob("*") if p.is_file()):
        by_library = path.stat().st_size > PIECE and manifest.base is None  # its files have no library
        blake3 = library_digest(stage, manifest.main.libraries) if by_library else None
        files[path.relative_to(stage).as_posix()] = file_entry(path, blake3)
    return seal(stage, msgspec.structs.replace(manifest, files=files))


def seal(stage: Path, manifest: Manifest) -> Manifest:
    """Write engine.json in its final form, and return it."""
    (stage / "engine.json").write_bytes(encode_sealed(manifest))
    return manifest
