"""What the clients' scripts share: each tries its features one by one and reports them as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

WORDS = "Hello there, friend."  # the scripted model's answer


def url() -> str:
    """The server's address, the script's only argument."""
    return sys.argv[1]


def report(features: dict[str, Callable[[], object]]) -> None:
    """Try each feature, which asserts what it wants, and print {feature: "ok" or why not}."""
    found = {}
    for name, feature in features.items():
        try:
            feature()
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    print("RESULT " + json.dumps(found))
