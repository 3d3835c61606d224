"""The signature of an engine: a minisign signature of engine.json, which has the digests of all other files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SignatureError, UsageError
from ..format.container import Container
from ..format.digest import digest_of
from ..format.load import read_manifest
from ..format.manifest import Manifest
from ..format.open_container import open_container
from ..format.present import BESIDE, MANIFEST_FILE, SIGNATURE_FILE
from ..speculate.choose import DRAFT
from .minisign import PublicKey

if TYPE_CHECKING:
    from ..options import LoadOptions


def read_public_key(given: str) -> PublicKey:
    """A public key, from its file or given as text. UsageError if it is neither."""
    path = Path(given)
    try:
        return PublicKey.parse(path.read_text() if path.is_file() else given)
    except UsageError as error:
        raise UsageError(f"key {given!r}: {error.message}", error.hint) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"key {given!r} cannot be read: {error}") from error


def check_signature(container: Container, manifest: Manifest, key: PublicKey) -> str:
    """The trusted comment of the signature of this manifest by this key. SignatureError if there is no such signature,
    or if the manifest has changed. Opening the engine compares the files with the manifest."""
    sizes = container.sizes()
    if SIGNATURE_FILE not in sizes:
        raise SignatureError(f"{container.path} is not signed", "sign it: icc sign ENGINE --key FILE")
    raw = container.read(MANIFEST_FILE)
    try:
        comment = key.verify(container.read(SIGNATURE_FILE).decode(), raw)
    except (SignatureError, UnicodeDecodeError) as error:
        hint = error.hint if isinstance(error, SignatureError) else ""
        raise SignatureError(f"{container.path}: {error}", hint) from error
    if not manifest.digest or digest_of(raw, manifest.digest) != manifest.digest:
        raise SignatureError(f"{container.path} has changed while it was read, or is not sealed", "open it again")
    return comment


def require_signatures(manifest: Manifest, options: LoadOptions) -> None:
    """Raise SignatureError unless the engine of this manifest, and a drafter's engine, are signed as the options
    require."""
    assert options.require_signature is not None
    key = read_public_key(options.require_signature)
    check_signature(open_container(Path(options.path)), manifest, key)
    kind, _, drafter = (options.spec or "").partition(":")
    if kind == DRAFT and drafter:
        check_signature(open_container(Path(drafter)), read_manifest(Path(drafter)), key)


def check_all_is_signed(container: Container, manifest: Manifest) -> None:
    """Raise SignatureError for a file that is not in the manifest, such as bytecode from Python or a foreign file. Also
    looks at the base of a delta, whose files run."""
    known = {MANIFEST_FILE, *BESIDE, *manifest.files}
    if manifest.base is not None:
        base = Path(manifest.base.path)
        check_all_is_signed(open_container(base), read_manifest(base))
    if more := sorted(container.sizes().keys() - known):
        raise SignatureError(f"{container.path}: {more[0]} is not what was signed", "remove it")
