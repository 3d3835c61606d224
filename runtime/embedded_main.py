"""What becomes ENGINE/__main__.py: `python ENGINE run -p "..."` with the copy of this runtime inside the engine, which
is a directory or one file."""

import gc
import os
import sys

ENGINE = os.path.dirname(os.path.abspath(__file__))


def keep_clean() -> None:
    """Leave the engine as it was written: no bytecode of what is imported, nor of this file, which has some already."""
    sys.dont_write_bytecode = True
    try:
        os.unlink(__spec__.cached)  # type: ignore[name-defined,arg-type]
        os.rmdir(os.path.join(ENGINE, "__pycache__"))
    except (OSError, NameError, AttributeError, TypeError):
        pass  # there is none


if __name__ == "__main__":
    gc.disable()  # until there is a command line, see `Cli.run`: looking through what is imported takes milliseconds
    keep_clean()
    sys.path.insert(0, ENGINE)  # first: its own `runtime`, whatever else is installed
    if os.path.isfile(ENGINE):
        from runtime import zipped_imports  # type: ignore[import-not-found]

        zipped_imports.install(ENGINE)
    try:
        from runtime.cli.commands import main  # type: ignore[import-not-found]
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:  # of the few libraries that an engine does not bring
        needed = (error.name or "").partition(".")[0]
        print(f"error: this needs {needed}, which is not installed\nhint: pip install {needed}", file=sys.stderr)
        sys.exit(3)
    sys.exit(main(sys.argv[1:], engine=ENGINE))
