"""The commands of the runtime, and the command line of an engine: `python ENGINE COMMAND ...`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .group import Cli, Lazy
from .own_engine import OwnEngine

COMMANDS = {
    "run": Lazy(f"{__package__}.run", "run_command", needs="generate"),
    "chat": Lazy(f"{__package__}.chat", "chat_command", needs="generate tokenizer template"),
    "serve": Lazy(f"{__package__}.serve", "serve_command", needs="server"),
    "batch": Lazy(f"{__package__}.batch", "batch_command", needs="server"),
    "bench": Lazy(f"{__package__}.bench", "bench_command"),
    "bench serve": Lazy(f"{__package__}.bench_serve", "bench_serve_command", needs="server"),
    "eval": Lazy(f"{__package__}.evaluate", "eval_command", needs="generate tokenizer"),
    "detect": Lazy(f"{__package__}.detect", "detect_command", needs="generate tokenizer"),
    "verify": Lazy(f"{__package__}.verify", "verify_command"),
    "inspect": Lazy(f"{__package__}.inspect", "inspect_command"),
    "report": Lazy(f"{__package__}.report", "report_command"),
    "doctor": Lazy(f"{__package__}.doctor", "doctor_command"),
}


def main(arguments: Sequence[str] | None = None, engine: str | None = None) -> int:
    """Run the command that the arguments name and return its exit code. arguments: None for those of the process.

    engine: the engine if it is implied; otherwise it is the command's first argument.
    """
    if engine is None:
        return Cli(COMMANDS, "Run engines of icc.").run(arguments, "icc")
    name = f"python {min(engine, os.path.relpath(engine), key=len)}"
    return Cli(COMMANDS, "Run this engine.").run(arguments, name, OwnEngine.read(engine))
