"""Opening an engine: read, check, map. No code of the engine is executed here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import EngineAbiError, EngineFieldError, EngineFormatError, EngineVersionError, UsageError
from .base_engine import with_base
from .canaries import Canaries
from .container import Container
from .decoding import COPY_AGAIN, decode
from .digest import check_seal
from .files import DigestPieces, EngineFiles
from .isa import cpu_flags, select_library
from .manifest import FORMAT_VERSION, KERNEL_ABI, MAIN, READ_VERSIONS, Library, Manifest, rank_program
from .open_container import open_container
from .present import MANIFEST_FILE, check_present
from .program import Program
from .programs import check_agreement, read_program
from .prompts import PROMPTS_DIR
from .targets import Targets, targets_in
from .verify import check_listing, check_paths
from .version2 import manifest_as_3
from .vocabulary import VOCABULARY_FILE, Vocabulary

if TYPE_CHECKING:
    from .weights import MappedWeights

_MAX_JSON = 256 << 20  # bytes; a larger manifest or program is refused


class Engine(msgspec.Struct, frozen=True):
    """An engine that has been read, checked and mapped: a directory or one file.

    program, weights: of the program `name`. library: its kernel library for this machine's CPU; None for a GPU engine,
    which has kernel objects in its plan instead.
    """

    path: Path
    manifest: Manifest
    program: Program
    weights: MappedWeights
    library: Library | None
    files: EngineFiles
    name: str = MAIN

    def open_program(self, name: str) -> Engine:
        """Open another program of the engine, with a library of the same ISA level; it must be closed separately.
        EngineFormatError if there is no program of that name, or if it was made for several ranks."""
        from .weights import MappedWeights

        entry = self.manifest.program(name)
        isa = self.library and self.library.isa
        library = select_library(entry.libraries, cpu_flags(), isa) if self.manifest.backend == "cpu" else None
        program = read_program(self.manifest, self.files, name)
        check_agreement(self.manifest, program, name)
        weights: MappedWeights | None = None
        for file in entry.weight_files:
            weights = MappedWeights(self.files.map(file), file, weights)
        assert weights is not None
        return Engine(self.path, self.manifest, program, weights, library, self.files, name)

    def tokenizer_json(self) -> bytes | None:
        """The content of the tokenizer's file; None if the engine only takes and returns token ids."""
        file = _tokenizer_file(self.manifest)
        return None if file is None else self.files.read(file)

    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer's tokens as tables; None if the tokenizer must be read as a whole."""
        raw = self.tokenizer_file(VOCABULARY_FILE)
        return None if raw is None else Vocabulary(raw)

    def tokenizer_file(self, name: str) -> bytes | None:
        """The content of another file of the tokenizer; None if there is none of this name."""
        file = f"{self.manifest.tokenizer_dir}/{name}"
        return self.files.read(file) if file in self.manifest.files else None

    def canaries(self) -> Canaries | None:
        """Prompts with known answers; None if the engine has none."""
        file = self.manifest.canaries_file
        return None if file is None else decode(self.files.read(file), file, Canaries)

    def close(self) -> None:
        """Unmap the weights; arrays over them must not be read any more."""
        self.weights.close()


class Opening(msgspec.Struct, frozen=True):
    """An engine whose large files are being verified on other threads, so that the caller can do slow work, such as
    imports, meanwhile. It must be ended by `finish` or `drop`."""

    path: Path
    manifest: Manifest
    program: Program
    library: Library | None
    files: EngineFiles
    mapped: dict[str, memoryview]

    def finish(self) -> Engine:
        """Wait until all files are verified, and return the engine. EngineFormatError names a file that has changed."""
        try:
            self.files.finish()
        except BaseException:
            self.drop()
            raise
        weights = _layered(self.mapped)
        return Engine(self.path, self.manifest, self.program, weights, self.library, self.files)

    def drop(self) -> None:
        """Stop verifying: the engine is not wanted."""
        self.files.drop()


def weights_of_other_ranks(engine: Engine) -> list[MappedWeights]:
    """The weights of ranks 1 and up of an engine. The ranks verify them themselves."""
    manifest, files = engine.manifest, engine.files
    programs = map(rank_program, range(1, manifest.ranks))
    return [_layered({name: files.map(name) for name in manifest.weight_files(program)}) for program in programs]


def _layered(mapped: Mapping[str, memoryview]) -> MappedWeights:
    from .weights import MappedWeights  # imports numpy

    weights: MappedWeights | None = None
    for name, content in mapped.items():
        weights = MappedWeights(content, name, weights)
    assert weights is not None
    return weights


def own_files(manifest: Manifest) -> list[str]:
    """The files of the manifest that are in the engine itself, not in the base of a delta."""
    shared = set() if manifest.base is None else {*manifest.base.shared}
    return [name for name in manifest.files if name not in shared]


def verify_files(container: Container, manifest: Manifest, files: EngineFiles) -> None:
    """Verify every file, whether this machine can run the engine or not. EngineFormatError for the first file that
    differs."""
    check_listing(container, manifest)
    mapped = {name: files.map(name) for name in manifest.weight_files()}
    try:
        files.begin((), mapped)
        files.finish()
    finally:
        for view in mapped.values():
            view.release()


def open_verified(path: Path) -> tuple[Container, Manifest]:
    """Open an engine to copy or sign it, with all files verified. EngineFormatError as `open_engine`."""
    manifest, container = read_manifest(path), open_container(path)
    verify_files(container, manifest, EngineFiles(container, manifest.files, True, manifest.base))
    return container, manifest


def read_targets(path: Path) -> Targets | None:
    """The targets of the engine at a path (see `targets_in`); None if it has only one. EngineFormatError if there is no
    engine."""
    check_present(path)
    return targets_in(open_container(path))


def verify_all(path: Path) -> list[tuple[Container, Manifest]]:
    """`open_verified` for each target of an engine. EngineFormatError also for a target that was replaced after the
    targets were put together."""
    targets = read_targets(path)
    if targets is None:
        return [open_verified(path)]
    found = [open_verified(path / target) for target in targets.targets]
    for (container, manifest), (target, entry) in zip(found, targets.targets.items(), strict=True):
        if manifest.digest != entry.digest:
            raise EngineFormatError(f"{container.path}: {MANIFEST_FILE} is of another {target}", COPY_AGAIN)
    return found


def begin_opening(
    path: str | os.PathLike[str],
    manifest: Manifest,
    *,
    verify: bool = True,
    isa: str | None = None,
    load_digests: Callable[[bytes, str], DigestPieces] | None = None,
    program: str = MAIN,
) -> Opening:
    """Begin to open the engine that the manifest was read from; see `open_engine`. program: the name of the program to
    open, which may be a rank's."""
    root = Path(path)
    check_abi(manifest)
    container = open_container(root)
    check_listing(container, manifest)
    main, library = manifest.program(program, alone=False), None
    if manifest.backend == "cpu":
        library = select_library(main.libraries, cpu_flags(), isa or os.environ.get("ICC_ISA"))
    files = EngineFiles(container, manifest.files, verify, manifest.base)
    steps = read_program(manifest, files)  # ranks run the same steps
    check_agreement(manifest, steps)  # all checks that need no weights come first
    mapped = {name: files.map(name) for name in manifest.weight_files(program)}
    digests = load_digests(files.read(library.path), library.path) if library and load_digests and verify else None
    used = [library and library.path, _tokenizer_file(manifest), f"{manifest.tokenizer_dir}/{VOCABULARY_FILE}"]
    used += [name for name in manifest.files if name.startswith(PROMPTS_DIR)]
    others = manifest.all_weights - mapped.keys() if manifest.ranks > 1 else ()
    files.begin([file for file in used if file], mapped, digests, others)
    return Opening(root, manifest, steps, library, files, mapped)


def open_engine(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    isa: str | None = None,
    load_digests: Callable[[bytes, str], DigestPieces] | None = None,
) -> Engine:
    """Open an engine directory or a one-file engine.

    verify: compare every file with its digest in the manifest before it is used; False only checks names and sizes.
    isa: use the library of this level; None: the one that the environment variable ICC_ISA names, else the best.
    load_digests: given the verified library's content and name, returns a function that computes BLAKE3 digests, for
    callers that run the library anyway; None: weights with BLAKE3 digests are compared with the sha256 of the whole
    file. Raises EngineVersionError, EngineFormatError (which file, which field), MissingIsaError or UsageError.
    """
    manifest = read_manifest(Path(path))
    return begin_opening(path, manifest, verify=verify, isa=isa, load_digests=load_digests).finish()


def read_manifest(root: Path) -> Manifest:
    """Read engine.json, decode it strictly and check its paths; the version is checked first. For a delta engine the
    files of its base are added. UsageError for an engine with several targets, of which one must be named."""
    manifest = _own_manifest(root)
    if manifest.base is not None:
        manifest = with_base(root, manifest, _own_manifest)
    check_paths(manifest)
    return manifest


def _own_manifest(root: Path) -> Manifest:
    """The content of engine.json."""
    raw = _read(root)
    facts = decode(raw, MANIFEST_FILE, dict[str, msgspec.Raw])
    if "targets" in facts:
        names = list(decode(bytes(facts["targets"]), MANIFEST_FILE, dict[str, msgspec.Raw]))
        raise UsageError(f"{root} holds several targets: {', '.join(names)}", f"name one of them: {root}/{names[0]}")
    version = decode(bytes(facts["format_version"]), MANIFEST_FILE, object) if "format_version" in facts else None
    if version is None:
        raise EngineFieldError(f"{MANIFEST_FILE}: field `format_version` is missing", COPY_AGAIN)
    if version not in READ_VERSIONS or isinstance(version, bool):
        raise EngineVersionError(version, READ_VERSIONS)
    manifest = decode(raw if version == FORMAT_VERSION else manifest_as_3(facts), MANIFEST_FILE, Manifest)
    check_seal(raw, manifest.digest)
    return manifest


def check_abi(manifest: Manifest) -> None:
    """Raise EngineAbiError if the kernels have another interface version than this runtime. If the manifest does not
    state it, it is checked when the library is loaded."""
    needed = KERNEL_ABI.get(manifest.backend)
    if needed is not None and manifest.kernel_abi not in (0, needed):
        raise EngineAbiError("the engine", manifest.kernel_abi, needed)


def _tokenizer_file(manifest: Manifest) -> str | None:
    file = f"{manifest.tokenizer_dir}/tokenizer.json"
    return file if file in manifest.files else None


def _read(root: Path) -> bytes:
    check_present(root)
    container = open_container(root)
    if container.size(MANIFEST_FILE) > _MAX_JSON:
        raise EngineFormatError(f"{MANIFEST_FILE} is too large to be a manifest", COPY_AGAIN)
    return container.read(MANIFEST_FILE)
