"""The directory for files that icc can make again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """icc's own directory in the user's cache directory, by the XDG specification."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "icc"
