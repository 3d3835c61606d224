"""`python -m icc.runtime.server.engine.worker_main FD OPTIONS LOG`: the engine process. FD: its socket."""

from __future__ import annotations

import socket
import sys
import time

from ...errors import IccError
from ...garbage import settle
from ...loading import open_llm
from ...options import LoadOptions
from ...parent import die_with_parent
from ..log import LogOptions, configure
from .channel import Channel
from .grammars import CompiledGrammars
from .kept_prompts import kept_prompts
from .messages import Fatal
from .prompt_folder import PromptFolder
from .worker import Worker


def main(arguments: list[str]) -> int:
    """Load the engine and serve it over a socket until that is closed; returns the exit code. arguments: the socket's
    file descriptor, LoadOptions as JSON, LogOptions as text, and, if there is one, the PromptFolder as JSON."""
    start = time.perf_counter()
    die_with_parent()
    configure(LogOptions.from_text(arguments[2]))
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    try:
        options = LoadOptions.from_json(arguments[1])
        folder = PromptFolder.from_json(arguments[3]) if len(arguments) > 3 else None
        llm = open_llm(options, shares_cache=folder is not None, checks=True)
    except IccError as error:
        channel.send(Fatal(error.message, error.hint, error.exit_code))
        return error.exit_code
    with llm:
        grammars = CompiledGrammars.of(llm)
        settle()  # steps should not wait for a collection of what lives on
        Worker(llm, channel, grammars, kept_prompts(llm, folder)).run(time.perf_counter() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
