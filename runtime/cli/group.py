"""Cli and Command: click's group and command with what all commands of icc share.

Commands are imported when they are asked for. An IccError becomes one line, a hint and its own exit code; so does a
wrong option. --debug shows the traceback instead.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import click
import msgspec

from ..errors import IccError, MissingExtraError, UsageError, install
from .own_engine import OwnEngine, own_engine

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
_EXTRAS = {
    "compile": ("huggingface_hub", "torch", "transformers", "safetensors", "jinja2", "triton", "gguf"),
    "onnx": ("onnx",),
    "ray": ("ray",),
    "structured": ("llguidance", "jsonschema_rs"),
    "serve": ("fastapi", "httptools", "prometheus_client", "python_multipart", "starlette", "uvicorn", "uvloop"),
}
_REFUSED = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENOSPC)
_BASE = ("numpy", "tokenizers", "msgspec", "minijinja", "rich")  # what the runtime needs without the compiler


class Lazy(msgspec.Struct, frozen=True):
    """A command that is imported on first use. needs: what an engine must have for the command to be listed, see
    OwnEngine."""

    module: str
    attribute: str
    needs: str = ""

    def load(self) -> click.Command:
        """Import the command."""
        return getattr(import_module(self.module), self.attribute)


class Cli(click.Group):
    """Commands by name, in the order in which help lists them. A name of two words, "bench serve", comes before one."""

    def __init__(self, commands: Mapping[str, Lazy], help: str, **more: Any) -> None:
        super().__init__(help=help, context_settings={"show_default": True, "max_content_width": 120}, **more)
        self.params.append(_debug())
        self._lazy = dict(commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands; in an engine's own copy of the runtime, those that the engine can run."""
        own = own_engine(ctx)
        return [name for name, lazy in self._lazy.items() if own is None or own.can(lazy.needs)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command of this name; None if there is no such command. IccError if the engine cannot
        run it."""
        lazy = self._lazy.get(cmd_name)
        if lazy is None:
            return None
        own = own_engine(ctx)
        if own is not None and not own.can(lazy.needs):
            raise own.refusal(cmd_name, lazy.needs)
        return lazy.load()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first two words or the first word name, and the arguments after it."""
        two = " ".join(args[:2])
        if two in self._lazy and len(args) > 1:
            return two, self.get_command(ctx, two), args[2:]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error becomes one line and an exit code."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of the output has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except EOFError as error:  # click would treat it as Ctrl-D at a prompt
            raise RuntimeError(f"unexpected end: {error}") from error
        except (IccError, ModuleNotFoundError, OSError) as error:
            said = error if isinstance(error, IccError) else _environment(error)
            if said is None or ctx.meta.get("debug"):
                raise
            ctx.exit(_say(said.message, said.hint, said.exit_code))

    def run(self, arguments: Sequence[str] | None, name: str | None, own: OwnEngine | None = None) -> int:
        """Run the command that the arguments name and return its exit code. arguments, name: None for those of the
        process. own: the engine that the command line belongs to; None for `icc`."""
        gc.enable()
        gc.set_threshold(50_000, 20, 20)  # most objects of a start live on: this takes a tenth of the time
        try:
            code = super().main(arguments, name, standalone_mode=False, obj=own)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            return error.exit_code
        except click.ClickException as error:
            path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else name
            return _say(error.format_message(), f"{path} --help", error.exit_code)
        except click.Abort:
            return INTERRUPTED
        return code if isinstance(code, int) else 0

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **more: Any) -> Any:
        """As click's `main`: end the process with the exit code. args, prog_name: None for those of the process."""
        sys.exit(self.run(args, prog_name))


class Command(click.Command):
    """A command with --debug whose help explains the values of options. In an engine's own copy of the runtime it lacks
    the parameters that this engine implies or cannot use."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        if not any(param.name == "debug" for param in self.params):  # a command made from another has it already
            self.params.append(_debug())

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters; in an engine's own copy of the runtime, those that apply to the engine, without ENGINE."""
        own, found = own_engine(ctx), super().get_params(ctx)
        if own is None:
            return found
        return [p for p in found if p.name != "engine" and own.can(getattr(p, "needs", ""))]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; in an engine's own copy of the runtime, ENGINE is that engine."""
        own = own_engine(ctx)
        if own is not None:  # parameters not in get_params; before click, which makes None of "no default"
            there = {param.name for param in self.get_params(ctx)}
            for param in self.params:
                if param.expose_value and param.name not in there:
                    ctx.params[str(param.name)] = own.path if param.name == "engine" else param.get_default(ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then for some of them what each value means."""
        super().format_options(ctx, formatter)
        for param in self.get_params(ctx):
            found = param.explained() if isinstance(param, EngineOption) and param.explained else {}
            if any(found.values()):
                with formatter.section(param.opts[0]):
                    formatter.write_dl(list(found.items()))


class EngineOption(click.Option):
    """An option that is only offered if the engine can do all that it `needs`. explained: the option's values and their
    meanings."""

    def __init__(
        self,
        names: Sequence[str],
        needs: str = "",
        explained: Callable[[], Mapping[str, str]] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(names, **more)
        self.needs, self.explained = needs, explained


def command(name: str, **more: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """`click.command` that makes a Command."""
    return click.command(name, cls=Command, **more)


def _debug() -> click.Option:
    def keep(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta["debug"] = True  # meta is shared by all contexts of a command line

    return click.Option(["--debug"], is_flag=True, expose_value=False, callback=keep, help="Show an error's traceback.")


def _environment(error: ModuleNotFoundError | OSError) -> IccError | None:
    """The refusal for a module that is not installed or a file that the system denies; None if the error is a bug of
    icc: a module that icc does not depend on, or a file that icc expected and did not find."""
    if isinstance(error, OSError):
        if error.errno not in _REFUSED or not isinstance(error.filename, str):
            return None
        name = error.filename if len(error.filename) < 200 else f"{error.filename[:80]!r} .."
        return UsageError(f"{name}: {os.strerror(error.errno)}")
    name = (error.name or "").split(".")[0]
    for extra, modules in _EXTRAS.items():
        if name in modules:
            return MissingExtraError(f"this needs {name}, which is not installed", install(extra))
    return (
        MissingExtraError(f"this needs {name}, which is not installed", f"pip install {name}")
        if name in _BASE
        else None
    )


def _say(message: str, hint: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    return code
