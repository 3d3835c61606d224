"""Constants: arguments of ops other than tensors and numbers, each one value, which graph text spells out."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, ClassVar


class ConstantArgument:
    """Base of frozen dataclasses that nodes of a graph take as an argument, such as AttentionSpec.

    Graph text shows it as `Name{field=value, field=value}`, without the fields that have their defaults; a field is a
    number, a text, None or another ConstantArgument. The reader of graph text finds a subclass by its name.
    """

    KNOWN: ClassVar[dict[str, type[ConstantArgument]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        ConstantArgument.KNOWN[cls.__name__] = cls

    def stated(self) -> dict[str, Any]:
        """The fields whose values are not their defaults, in order."""
        found: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if value != default:
                found[field.name] = value
        return found
