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

_MAX_JSON = 256 << 20  # bytes; a manifest or program beyond this is not one


class Engine(msgspec.Struct, frozen=True):
    """An engine that has been read, checked and mapped: a directory or one file.

    program, weights: those of the program called `name`. library: of that program, for this machine's CPU; a GPU engine
    has kernel objects in its plan instead, and None here.
    """

    path: Path
    manifest: Manifest
    program: Program
    weights: MappedWeights
    library: Library | None
    files: EngineFiles
    name: str = MAIN

    def open_program(self, name: str) -> Engine:
        """Another program of the engine, to be closed by itself; its library is of the same level as this one's.
        EngineFormatError if there is none of that name, or it was made for several ranks."""
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
        """The tokenizer's content, or None for an engine that takes and gives token ids only."""
        file = _tokenizer_file(self.manifest)
        return None if file is None else self.files.read(file)

    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer's tokens as tables; None for one that must be read as a whole."""
        raw = self.tokenizer_file(VOCABULARY_FILE)
        return None if raw is None else Vocabulary(raw)

    def tokenizer_file(self, name: str) -> bytes | None:
        """The content of another file of the tokenizer; None if there is none of this name."""
        file = f"{self.manifest.tokenizer_dir}/{name}"
        return self.files.read(file) if file in self.manifest.files else None

    def canaries(self) -> Canaries | None:
        """Prompts with known answers; None where the engine has none."""
        file = self.manifest.canaries_file
        return None if file is None else decode(self.files.read(file), file, Canaries)

    def close(self) -> None:
        """Unmap the weights; arrays over them may not be read any more."""
        self.weights.close()


class Opening(msgspec.Struct, frozen=True):
    """An engine whose large files are being compared with their digests, on other threads, since it was made:
    what takes time, as imports do, can be done meanwhile. It ends with `finish` or `drop`."""

    path: Path
    manifest: Manifest
    program: Program
    library: Library | None
    files: EngineFiles
    mapped: dict[str, memoryview]

    def finish(self) -> Engine:
        """The engine, once all its files are as they were written. EngineFormatError says which is not."""
        try:
            self.files.finish()
        except BaseException:
            self.drop()
            raise
        weights = _layered(self.mapped)
        return Engine(self.path, self.manifest, self.program, weights, self.library, self.files)

    def drop(self) -> None:
        """The engine is not wanted."""
        self.files.drop()


def weights_of_other_ranks(engine: Engine) -> list[MappedWeights]:
    """What ranks 1 and up of an engine have, which they compare with their digests themselves."""
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
    """The files of the manifest that lie in the engine itself, and not in the base of a delta."""
    shared = set() if manifest.base is None else {*manifest.base.shared}
    return [name for name in manifest.files if name not in shared]


def verify_files(container: Container, manifest: Manifest, files: EngineFiles) -> None:
    """Compare every file with its digest, whether this machine can run the engine or not. EngineFormatError for the
    first that differs."""
    check_listing(container, manifest)
    mapped = {name: files.map(name) for name in manifest.weight_files()}
    try:
        files.begin((), mapped)
        files.finish()
    finally:
        for view in mapped.values():
            view.release()


def open_verified(path: Path) -> tuple[Container, Manifest]:
    """An engine to be copied or signed, all files compared with their digests. EngineFormatError as `open_engine`."""
    manifest, container = read_manifest(path), open_container(path)
    verify_files(container, manifest, EngineFiles(container, manifest.files, True, manifest.base))
    return container, manifest


def read_targets(path: Path) -> Targets | None:
    """`targets_in`, of the engine at a path; None for an engine of one. EngineFormatError if there is no engine."""
    check_present(path)
    return targets_in(open_container(path))


def verify_all(path: Path) -> list[tuple[Container, Manifest]]:
    """`open_verified`, of each target of an engine of several. EngineFormatError, too, for a target that is not the one
    they were put together with."""
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
    """Begin to open the engine that the manifest was read from; see `open_engine`. program: the one to open;
    a rank's, too."""
    root = Path(path)
    check_abi(manifest)
    container = open_container(root)
    check_listing(container, manifest)
    main, library = manifest.program(program, alone=False), None
    if manifest.backend == "cpu":
        library = select_library(main.libraries, cpu_flags(), isa or os.environ.get("ICC_ISA"))
    files = EngineFiles(container, manifest.files, verify, manifest.base)
    steps = read_program(manifest, files)  # ranks run the same steps
    check_agreement(manifest, steps)  # all that can be said without the weights comes before them
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

    verify: compare every file with its sha256 in the manifest before it is used; False only checks names and sizes. isa
    (or the environment variable ICC_ISA): take this library instead of the best one; None: that one. load_digests:
    makes, of that library's content and name, what makes BLAKE3 digests, once the library is verified: for those who
    run it anyway. Without it (None) the weights are compared with the sha256 of the whole file. Raises
    EngineVersionError, EngineFormatError (which file, which field), MissingIsaError or UsageError.
    """
    manifest = read_manifest(Path(path))
    return begin_opening(path, manifest, verify=verify, isa=isa, load_digests=load_digests).finish()


def read_manifest(root: Path) -> Manifest:
    """engine.json of an engine, decoded strictly, its paths checked. The version is checked first. A delta
    engine's has the files of its base, too. UsageError for an engine of several targets: one is to be named."""
    manifest = _own_manifest(root)
    if manifest.base is not None:
        manifest = with_base(root, manifest, _own_manifest)
    check_paths(manifest)
    return manifest


def _own_manifest(root: Path) -> Manifest:
    """What stands in engine.json."""
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
    """EngineAbiError if the kernels are called in another way than this runtime calls them. An engine that does not
    state it tells when its library is loaded."""
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
