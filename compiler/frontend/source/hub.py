"""Downloads models by their name on the Hugging Face hub, through huggingface_hub with its cache, progress bars and
settings."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from ...errors import HubError
from .identify import CONFIG, no_checkpoint

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model")
_LEFT_OUT = ("consolidated*", "original/*", "onnx/*", "openvino/*", "coreml/*", "*.onnx_data")
_PATIENCE = 3.0  # seconds to wait for a connection before only the cache is used
_OTHERWISE = "give a checkpoint directory, or fill the cache where there is a network: hf download ORG/NAME"
T = TypeVar("T")


def is_hub_name(path: Path) -> bool:
    """Whether a MODEL is no existing path and has the form ORG/NAME or ORG/NAME@REVISION."""
    return _NAME.fullmatch(str(path)) is not None and not path.exists()


def fetch_config(path: Path) -> Path:
    """The local copy of a hub model's config.json, in the snapshot of its revision.

    HubError if it cannot be downloaded; CheckpointError or UnsupportedModel, which say what the repository holds
    instead, if it has no config.json.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    name, revision = _parts(path)
    offline = _offline()
    try:
        download = lambda: hf_hub_download(name, CONFIG, revision=revision, local_files_only=bool(offline))  # noqa: E731
        return Path(_told(download, path, offline))
    except RemoteEntryNotFoundError:
        raise no_checkpoint(str(path), _names(HfApi(), name, revision)) from None


def fetch(path: Path, cached: bool = False) -> Path:
    """The directory with the files of a hub model that a compile reads; files that are not in the cache are downloaded.

    cached: never download, and raise HubError instead.
    """
    from huggingface_hub import snapshot_download

    name, revision = _parts(path)
    offline = "nothing is downloaded" if cached else _offline()
    return Path(
        _told(
            lambda: snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(_FILES),
                ignore_patterns=list(_LEFT_OUT),
                local_files_only=bool(offline),
            ),
            path,
            offline,
        )
    )


def _parts(path: Path) -> tuple[str, str | None]:
    found = _NAME.fullmatch(str(path))
    assert found is not None, f"{path} is no name of a hub model"
    return found["name"], found["revision"]


def _offline() -> str:
    """Why nothing can be downloaded; "" if it can. The library itself would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    if getproxies().get(address.scheme):
        return ""
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), _PATIENCE).close()
    except OSError as error:
        return f"{address.hostname} cannot be reached: {error.strerror or error}"
    return ""


def _told(download: Callable[[], T], path: Path, offline: str) -> T:
    """The result of `download`. Errors of huggingface_hub are raised as HubError with a plain message."""
    from huggingface_hub import errors

    try:
        return download()
    except errors.RemoteEntryNotFoundError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(
            f"{path} on the Hugging Face hub is gated", "accept its terms on its page there, then: hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{path} is neither a directory here nor a model on the Hugging Face hub",
            "check the name; a private model needs: hf auth login",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{path}: the model has no such revision on the Hugging Face hub") from error
    except errors.LocalEntryNotFoundError as error:
        reason = offline or "the download failed"
        raise HubError(
            f"{path} is neither a directory here nor in the cache of the Hugging Face hub, and {reason}", _OTHERWISE
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise HubError(f"{path} cannot be downloaded from the Hugging Face hub: {reason}", _OTHERWISE) from error


def _names(api: HfApi, name: str, revision: str | None) -> list[str]:
    try:
        return api.list_repo_files(name, revision=revision)
    except OSError:
        return []
