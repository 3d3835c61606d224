"""Facts about an engine as text for a terminal."""

from __future__ import annotations

from ..format.footprint import size_text


def as_text(facts: dict[str, object], indent: str = "", bytes_all: bool = False) -> str:
    """Facts as text for a terminal: one per line, nested ones indented. bytes_all: every number is a size in bytes."""
    lines: list[str] = []
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}:", as_text(value, indent + "  ", "bytes" in name)]
        elif isinstance(value, list):
            lines.append(f"{indent}{name}:" + ("" if value else " none"))
            for item in value:
                text = ", ".join(f"{key} {part}" for key, part in item.items()) if isinstance(item, dict) else item
                lines.append(f"{indent}  - {text}")
        else:
            shown = size_text(value) if (bytes_all or "bytes" in name) and isinstance(value, int | float) else value
            lines.append(f"{indent}{name}: {shown}")
    return "\n".join(lines)
