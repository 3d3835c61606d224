"""The `icc` command: the runtime's commands and those that compile. Modules are imported only when a command needs
them."""

from __future__ import annotations

import click

from .. import __version__
from ..runtime.cli.commands import COMMANDS as RUNTIME
from ..runtime.cli.group import Cli, Lazy

_HERE = f"{__package__}.commands"
COMMANDS = {
    "compile": Lazy(f"{_HERE}.compile", "compile_command"),
    "plan": Lazy(f"{_HERE}.plan", "plan_command"),
    **RUNTIME,
    **{name: Lazy(f"{_HERE}.on_demand", f"{name}_command") for name in ("run", "chat", "serve") if name in RUNTIME},
    "eval": Lazy(f"{_HERE}.evaluate", "eval_command"),
    "cache list": Lazy(f"{_HERE}.cache", "list_command"),
    "cache prune": Lazy(f"{_HERE}.cache", "prune_command"),
    "inspect": Lazy(f"{_HERE}.inspect", "inspect_command"),
    "export": Lazy(f"{_HERE}.export", "export_command"),
    "opt": Lazy(f"{_HERE}.opt", "opt_command"),
    "diff": Lazy(f"{_HERE}.diff", "diff_command"),
    "refit": Lazy(f"{_HERE}.refit", "refit_command"),
    "verify": Lazy(f"{_HERE}.verify", "verify_command"),
    "sbom": Lazy(f"{_HERE}.origins", "sbom_command"),
    "provenance": Lazy(f"{_HERE}.origins", "provenance_command"),
    "keygen": Lazy(f"{_HERE}.sign", "keygen_command"),
    "sign": Lazy(f"{_HERE}.sign", "sign_command"),
    "pack": Lazy(f"{_HERE}.pack", "pack_command"),
    "unpack": Lazy(f"{_HERE}.pack", "unpack_command"),
    "train-heads": Lazy(f"{_HERE}.train_heads", "train_heads_command"),
    "tune": Lazy(f"{_HERE}.tune", "tune_command"),
}

main = Cli(COMMANDS, "icc compiles language models ahead of time and runs the engines.")
click.version_option(__version__, prog_name="icc")(main)

if __name__ == "__main__":
    main(prog_name="icc")
