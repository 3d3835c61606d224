"""The inputs of an engine: a bill of materials and its provenance, as files beside the manifest, and a rebuild.

Formats: CycloneDX 1.6 (ECMA-424); in-toto's Statement v1 with SLSA's provenance v1 (https://slsa.dev/spec/v1.0/provenance).
Nothing in them depends on time or place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..runtime.errors import EngineFormatError
from ..runtime.format.container import Container
from ..runtime.format.load import open_verified, read_manifest
from ..runtime.format.manifest import Manifest
from ..runtime.format.present import MANIFEST_FILE, PROVENANCE_FILE, SBOM_FILE, engine_name
from .errors import RebuildError, UsageError
from .identity import model_files
from .progress import Reporter
from .recorded import REPORT_FILE, options_again
from .signing import put_beside

BUILD_TYPE = "urn:icc-llm:compile:v1"
_LICENCE = re.compile(r"\A---\n(?:.*\n)*?license:\s*['\"]?([\w.+-]+)['\"]?\s*\n(?:.*\n)*?---", re.MULTILINE)


def write_sbom(engine: Path, model: Path) -> None:
    """Put a CycloneDX bill of materials beside the manifest. model: the checkpoint that it was compiled from.
    EngineFormatError or a subclass for the engine, UsageError for a model that does not exist."""
    container, manifest = open_verified(engine)
    put_beside(container, {SBOM_FILE: _json(sbom(_text(engine_name(engine.resolve())), manifest, model))})


def write_provenance(engine: Path, model: Path) -> None:
    """Put an in-toto statement beside the manifest: the files and options that the engine was compiled from. Raises as
    `write_sbom`."""
    container, manifest = open_verified(engine)
    put_beside(container, {PROVENANCE_FILE: _json(provenance(container, manifest, model))})


def sbom(name: str, manifest: Manifest, model: Path) -> dict[str, Any]:
    """The bill of materials of the engine `name`."""
    inputs = input_digests(model)
    licence = licence_of(model)
    checkpoint = {"type": "machine-learning-model", "bom-ref": "checkpoint", "name": _text(model.resolve().name)}
    checkpoint |= {"licenses": [{"license": {"name": licence}}]} if licence else {}
    files = [
        {"type": "data" if "token" in name else "file", "bom-ref": _ref(name), "name": name, "hashes": [_hash(digest)]}
        for name, digest in inputs.items()
    ]
    own = {
        "type": "machine-learning-model",
        "bom-ref": "engine",
        "name": name,
        "hashes": [_hash(manifest.digest)],
        "properties": [
            {"name": f"icc:{key}", "value": value}
            for key, value in (
                ("target", manifest.target),
                ("architecture", manifest.model.architecture),
                ("quantization", manifest.quantization.method),
            )
        ],
    }
    compiler = {"type": "application", "bom-ref": "compiler", "name": "icc-llm", "version": manifest.icc_version}
    runtime = [
        {"type": "library", "bom-ref": folder, "name": known, "licenses": [{"license": {"id": spdx}}]}
        for folder, known, spdx in (("runtime", "icc-llm", "Apache-2.0"), ("click", "click", "BSD-3-Clause"))
        if any(file.startswith(f"{folder}/") for file in manifest.files)
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, manifest.digest)}",
        "version": 1,
        "metadata": {"component": own, "tools": {"components": [compiler]}},
        "components": [checkpoint, *files, *runtime],
        "dependencies": [
            {"ref": "engine", "dependsOn": ["checkpoint", *(one["bom-ref"] for one in runtime)]},
            {"ref": "checkpoint", "dependsOn": list(map(_ref, inputs))},
        ],
    }


def provenance(container: Container, manifest: Manifest, model: Path) -> dict[str, Any]:
    """The statement about the engine in a container."""
    subject = hashlib.sha256(container.read(MANIFEST_FILE)).hexdigest()
    options = json.loads(container.read(REPORT_FILE)).get("options") if REPORT_FILE in manifest.files else None
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": MANIFEST_FILE, "digest": {"sha256": subject}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"model": _text(model.resolve().name), "options": options},
                "resolvedDependencies": [
                    {"name": file, "digest": {"sha256": digest}} for file, digest in input_digests(model).items()
                ],
            },
            "runDetails": {"builder": {"id": BUILD_TYPE, "version": {"icc-llm": manifest.icc_version}}},
        },
    }


def input_digests(model: Path) -> dict[str, str]:
    """The sha256 of every file of a model, by name; see `_text`. UsageError if the model does not exist."""
    if not model.exists():
        raise UsageError(f"--model {model} does not exist", "give the checkpoint that the engine was compiled from")
    folder = model.parent if model.is_file() else model
    found: dict[str, str] = {}
    for path in model_files(model):
        with path.open("rb") as file:
            found[_text(path.relative_to(folder).as_posix())] = hashlib.file_digest(file, "sha256").hexdigest()
    return dict(sorted(found.items()))


def licence_of(model: Path) -> str:
    """The licence that the checkpoint's model card states; "" if it states none."""
    card = (model.parent if model.is_file() else model) / "README.md"
    if not card.is_file():
        return ""
    found = _LICENCE.match(card.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else ""


def rebuild(engine: Path, model: Path, given: Mapping[str, Any], reporter: Reporter) -> None:
    """Compile a model as an engine was compiled, with its prompts and forms, and compare. given: see `options_again`.
    RebuildError names what differs: an input, if the engine has a provenance, or a file of the engine. Also raises the
    errors of `options_again` and of a compile."""
    container, manifest = open_verified(engine)
    if manifest.base is not None:
        raise UsageError(f"{engine} is a delta", "rebuild its base; a refit with the same checkpoint gives the rest")
    if PROVENANCE_FILE in container.sizes():
        _check_inputs(_stated_inputs(container), input_digests(model))
    from .driver import compile_engine  # these import torch
    from .engine.earlier import open_earlier

    opened = open_earlier(engine)
    try:
        with tempfile.TemporaryDirectory(prefix="icc-rebuild-") as folder:
            options = options_again(opened.engine, model, Path(folder, "engine"), given)
            compile_engine(options, reporter, kept=opened)
            made = read_manifest(options.output)
    finally:
        opened.close()
    if made.digest == manifest.digest:
        return
    names = sorted({*made.files, *manifest.files})
    differ = [name for name in names if made.files.get(name) != manifest.files.get(name)] or [MANIFEST_FILE]
    by = "" if made.icc_version == manifest.icc_version else f"; icc {manifest.icc_version} compiled it"
    raise RebuildError(
        f"a compile of {model} gives another engine: {len(differ)} files differ, among them {differ[0]}{by}",
        "the same icc, libraries and C++ compiler are needed; icc diff compares two engines",
    )


def _stated_inputs(container: Container) -> dict[str, str]:
    """The digests that the provenance of an engine states, by name. EngineFormatError if the provenance, which no
    digest covers, is damaged."""
    try:
        statement = json.loads(container.read(PROVENANCE_FILE))
        stated = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        return {str(one["name"]): str(one["digest"]["sha256"]) for one in stated}
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise EngineFormatError(
            f"{container.path}: {PROVENANCE_FILE} is damaged: {type(error).__name__}: {str(error)[:80]}",
            "remove it, or make it again: icc provenance",
        ) from error


def _check_inputs(wanted: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise RebuildError(f"{name} is not the file that {PROVENANCE_FILE} names", "give the same checkpoint")


def _ref(name: str) -> str:
    """The reference of a file of the checkpoint, distinct from other references: a file may have a name such as
    "engine"."""
    return f"file:{name}"


def _text(name: str) -> str:
    """The name of a file as text: bytes that are not UTF-8 become escapes ("\\xff"), because readers of JSON, such as
    in-toto's, refuse lone surrogates."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _hash(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"
