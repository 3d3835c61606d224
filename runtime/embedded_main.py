"""The source of ENGINE/__main__.py: `python ENGINE run -p "..."` uses the copy of this runtime inside the engine, which
is a directory or one file."""

import gc
import os
import sys

ENGINE = os.path.dirname(os.path.abspath(__file__))


def keep_clean() -> None:
    """Keep bytecode files out of the engine: none for imported modules, and delete that of this file."""
    sys.dont_write_bytecode = True
    try:
        os.unlink(__spec__.cached)  # type: ignore[name-defined,arg-type]
        os.rmdir(os.path.join(ENGINE, "__pycache__"))
    except (OSError, NameError, AttributeError, TypeError):
        pass  # there is no such file


if __name__ == "__main__":
    gc.disable()  # until the command line is parsed, see `Cli.run`: collecting the imported objects takes milliseconds
    keep_clean()
    sys.path.insert(0, ENGINE)  # first, so that its own `runtime` is imported, whatever else is installed
    if os.path.isfile(ENGINE):
        from runtime import zipped_imports  # type: ignore[import-not-found]

        zipped_imports.install(ENGINE)
    try:
        from runtime.cli.commands import main  # type: ignore[import-not-found]
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:  # one of the few libraries that an engine does not contain
        needed = (error.name or "").partition(".")[0]
        print(f"error: this needs {needed}, which is not installed\nhint: pip install {needed}", file=sys.stderr)
        sys.exit(3)
    sys.exit(main(sys.argv[1:], engine=ENGINE))
