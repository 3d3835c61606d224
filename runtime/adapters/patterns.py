"""Regular expressions of an adapter's configuration. They are not trusted: one that could take very long is refused."""

from __future__ import annotations

import re
from functools import lru_cache

from ..errors import AdapterError

_LONGEST, _LONGEST_NAME = 1000, 200  # characters
_MOST_REPEATS, _MOST_GROUPS = 3, 4


def ends_with(name: str, pattern: str) -> bool:
    """Whether the end of a module's name, after a dot, matches a pattern, as PEFT tests it."""
    return len(name) <= _LONGEST_NAME and _compiled(pattern).match(name) is not None


@lru_cache(4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern. AdapterError for a text that is no regular expression, or one on which Python may backtrack
    for very long: each choice doubles the number of ways, and a group that repeats has no bound."""
    repeats, groups = len(re.findall(r"[*+?{]", pattern)), pattern.count("(")
    nested = re.search(r"\)[*+{]|\\\d", pattern)
    if len(pattern) > _LONGEST or nested or repeats > _MOST_REPEATS or groups > _MOST_GROUPS:
        raise AdapterError(
            f"the pattern {pattern[:80]!r} could take too long: it has {repeats} repetitions and {groups} groups",
            "write the names of its modules out",
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise AdapterError(f"{pattern!r} is no regular expression: {error}") from None
