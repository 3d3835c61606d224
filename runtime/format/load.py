"""Opening an engine directory: read, check, map. Nothing of it is executed here, but for what the caller brings."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..errors import EngineAbiError, EngineFieldError, EngineFormatError, EngineVersionError, KVLayoutError
from ..kv.policy import EVICTING, POLICIES
from .batch import declaration_problem
from .canaries import Canaries
from .digest import digest_of
from .files import DigestPieces, EngineFiles
from .isa import cpu_flags, select_library
from .kv import KV_DTYPES, MAX_BLOCK_SIZE, KVGroup
from .manifest import FORMAT_VERSION, KERNEL_ABI, Library, Manifest
from .present import MANIFEST_FILE, check_present
from .program import Program
from .verify import check_listing, check_paths
from .vocabulary import VOCABULARY_FILE, Vocabulary

if TYPE_CHECKING:
    from .weights import MappedWeights

_HINT = "copy the engine again from where it was made, or compile the model again"
_NEWER = "a field that this one does not know is of a later version"
T = TypeVar("T")
_MAX_JSON = 256 << 20  # bytes; a manifest or program beyond this is not one


class Engine(msgspec.Struct, frozen=True):
    """An engine directory that has been read, checked and mapped.

    `library` is the one for this machine's CPU; a GPU engine has kernel objects in its plan instead, and None here.
    """

    path: Path
    manifest: Manifest
    program: Program
    weights: MappedWeights
    library: Library | None
    files: EngineFiles

    def tokenizer_json(self) -> bytes | None:
        """The tokenizer's content, or None for an engine that takes and gives token ids only."""
        file = _tokenizer_file(self.manifest)
        return None if file is None else self.files.read(file)

    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer's tokens as tables; None for one that must be read as a whole."""
        raw = self.tokenizer_file(VOCABULARY_FILE)
        return None if raw is None else Vocabulary(raw)

    def tokenizer_file(self, name: str) -> bytes | None:
        """The content of another file of the tokenizer, if there is one of this name."""
        file = f"{self.manifest.tokenizer_dir}/{name}"
        return self.files.read(file) if file in self.manifest.files else None

    def canaries(self) -> Canaries | None:
        """Prompts with known answers; None where the engine has none."""
        file = self.manifest.canaries_file
        return None if file is None else _decode(self.files.read(file), file, Canaries)

    def close(self) -> None:
        self.weights.close()


class Opening(msgspec.Struct, frozen=True):
    """An engine directory whose large files are being compared with their digests, on other threads, since it was made:
    what takes time, as imports do, can be done meanwhile. It ends with `finish` or `drop`."""

    path: Path
    manifest: Manifest
    program: Program
    library: Library | None
    files: EngineFiles
    mapped: mmap.mmap

    def finish(self) -> Engine:
        """The engine, once all its files are as they were written. EngineFormatError says which is not."""
        try:
            self.files.finish()
        except BaseException:
            self.drop()
            raise
        from .weights import MappedWeights  # imports numpy

        weights = MappedWeights(self.mapped, self.manifest.weights_file)
        return Engine(self.path, self.manifest, self.program, weights, self.library, self.files)

    def drop(self) -> None:
        """The engine is not wanted."""
        self.files.drop()


def begin_opening(
    path: str | os.PathLike[str],
    manifest: Manifest,
    *,
    verify: bool = True,
    isa: str | None = None,
    load_digests: Callable[[bytes, str], DigestPieces] | None = None,
) -> Opening:
    """Begin to open the engine directory that the manifest was read from; see `open_engine`."""
    root = Path(path)
    check_abi(manifest)
    check_listing(root, manifest)
    library = None
    if manifest.backend == "cpu":
        library = select_library(manifest, cpu_flags(), isa or os.environ.get("ICC_ISA"))
    files = EngineFiles(root, manifest.files, verify)
    program = decode_program(files.read(manifest.program_file), manifest.program_file)
    _check_agreement(manifest, program)  # all that can be said without the weights comes before them
    mapped = files.map(manifest.weights_file)
    digests = load_digests(files.read(library.path), library.path) if library and load_digests and verify else None
    used = (library and library.path, _tokenizer_file(manifest), f"{manifest.tokenizer_dir}/{VOCABULARY_FILE}")
    files.begin([file for file in used if file], {manifest.weights_file: memoryview(mapped)}, digests)
    return Opening(root, manifest, program, library, files, mapped)


def open_engine(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    isa: str | None = None,
    load_digests: Callable[[bytes, str], DigestPieces] | None = None,
) -> Engine:
    """Open an engine directory.

    verify: compare every file with its sha256 in the manifest before it is used; False only checks names and sizes.
    isa (or the environment variable ICC_ISA): take this library instead of the best one. load_digests: makes, of that
    library's content and name, what makes BLAKE3 digests, once the library is verified: for those who run it anyway.
    Without it the weights are compared with the sha256 of the whole file.
    Raises EngineVersionError, EngineFormatError (which file, which field), MissingIsaError or UsageError.
    """
    manifest = read_manifest(Path(path))
    return begin_opening(path, manifest, verify=verify, isa=isa, load_digests=load_digests).finish()


def read_manifest(root: Path) -> Manifest:
    """engine.json of an engine directory, decoded strictly, its paths checked. The version is checked first."""
    raw = _read(root)
    facts = _decode(raw, MANIFEST_FILE, dict[str, msgspec.Raw])
    version = _decode(bytes(facts["format_version"]), MANIFEST_FILE, object) if "format_version" in facts else None
    if version is None:
        raise EngineFieldError(f"{MANIFEST_FILE}: field `format_version` is missing", _HINT)
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise EngineVersionError(version, FORMAT_VERSION)
    manifest = _decode(raw, MANIFEST_FILE, Manifest)
    if manifest.digest and digest_of(raw, manifest.digest) != manifest.digest:
        raise EngineFormatError(f"{MANIFEST_FILE} has changed since it was written", _HINT)
    check_paths(manifest)
    return manifest


def check_abi(manifest: Manifest) -> None:
    """EngineAbiError if the kernels are called in another way than this runtime calls them. An engine that does not
    state it tells when its library is loaded."""
    needed = KERNEL_ABI.get(manifest.backend)
    if needed is not None and manifest.kernel_abi not in (0, needed):
        raise EngineAbiError("the engine", manifest.kernel_abi, needed)


def decode_program(raw: bytes, name: str) -> Program:
    """program.json, decoded strictly."""
    return _decode(raw, name, Program)


def _tokenizer_file(manifest: Manifest) -> str | None:
    file = f"{manifest.tokenizer_dir}/tokenizer.json"
    return file if file in manifest.files else None


def _read(root: Path) -> bytes:
    file = check_present(root)
    try:
        if file.stat().st_size > _MAX_JSON:
            raise EngineFormatError(f"{MANIFEST_FILE} is too large to be a manifest", _HINT)
        return file.read_bytes()
    except OSError as error:
        raise EngineFormatError(f"{MANIFEST_FILE} cannot be read: {error.strerror}", _HINT) from error


def _decode(raw: bytes, name: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        hint = f"compile the model again, or install the icc that wrote the engine; {_NEWER}"
        raise EngineFieldError(f"{name}: {error}", hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(f"{name}: {error}", _HINT) from error


def _check_agreement(manifest: Manifest, program: Program) -> None:
    """The facts that manifest and program both state must be equal."""
    embedding = manifest.embedding
    found, stated = program.vocab_size, manifest.model.vocab_size if embedding is None else embedding.row_width
    if found != stated:
        raise EngineFormatError(
            f"{manifest.program_file}: vocab_size is {found}, {MANIFEST_FILE} says {stated}",
            _HINT,
        )
    if program.samples != (embedding is None):
        raise EngineFormatError(f"{manifest.program_file} and {MANIFEST_FILE} disagree about embeddings", _HINT)
    if (program.plan is None) != (manifest.backend == "cpu") or (manifest.gpu is None) != (manifest.backend == "cpu"):
        raise EngineFormatError(f"{manifest.program_file}: its launch plan does not go with {MANIFEST_FILE}", _HINT)
    for name, found in program.plan.objects.items() if program.plan else ():
        if found.file not in manifest.files:
            raise EngineFormatError(f"{manifest.program_file}: object {name} is not listed in {MANIFEST_FILE}", _HINT)
    if problem := declaration_problem(program.inputs):
        raise EngineFormatError(f"{manifest.program_file}: {problem}", _HINT)
    for group in program.kv.groups:
        _check_group(group)
    limits = manifest.limits
    if min(limits.max_seq_len, limits.max_batch_size, limits.max_step_tokens) < 1:
        raise EngineFormatError(f"{MANIFEST_FILE}: limits must be at least 1", _HINT)


def _check_group(group: KVGroup) -> None:
    """KVLayoutError if this runtime cannot keep such a group."""
    if not 1 <= group.block_size <= MAX_BLOCK_SIZE:
        raise KVLayoutError(
            f"the engine keeps {group.block_size} tokens in a KV block, this runtime can keep 1 to {MAX_BLOCK_SIZE}",
            _HINT,
        )
    if group.dtype not in KV_DTYPES:
        raise KVLayoutError(
            f"the engine's KV cache is of type {group.dtype!r}, this runtime has {', '.join(KV_DTYPES)}",
            "compile the model again with this version of icc",
        )
    paired = group.keeps in EVICTING
    if group.keeps not in POLICIES or group.size < (paired or group.keeps == "window") or (group.beside > 0) != paired:
        raise KVLayoutError(
            f"the engine's KV cache keeps {group.keeps!r} of size {group.size}, this runtime has {', '.join(POLICIES)}",
            "compile the model again with this version of icc",
        )
