"""The identity of an engine: all from which the HTTP process makes requests. A replacement must have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from ...format.manifest import FileEntry, Manifest

REQUEST_FIELDS = ("backend", "model", "limits", "sampling", "embedding", "tokenizer_dir")


def tokenizer_files(manifest: Manifest) -> Mapping[str, FileEntry]:
    """The files of the tokenizer and the chat template, by name."""
    return {name: entry for name, entry in manifest.files.items() if name.startswith("tokenizer/")}


def identity_of(manifest: Manifest) -> str:
    """A digest of REQUEST_FIELDS and the files of the tokenizer; weights and kernels are not part of it."""
    facts = [[getattr(manifest, name) for name in REQUEST_FIELDS], sorted(tokenizer_files(manifest).items())]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
