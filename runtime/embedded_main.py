"""The source of ENGINE/__main__.py: `python ENGINE run -p "..."` uses the copy of this runtime inside the engine, which
is a directory or one file. A delta engine uses the copy of its base."""

import gc
import os
import sys
from importlib.machinery import PathFinder

ENGINE = os.path.dirname(os.path.abspath(__file__))


def keep_clean() -> None:
    """Keep bytecode files out of the engine: none for imported modules, and delete that of this file."""
    sys.dont_write_bytecode = True
    try:
        os.unlink(__spec__.cached)  # type: ignore[name-defined,arg-type]
        os.rmdir(os.path.join(ENGINE, "__pycache__"))
    except (OSError, NameError, AttributeError, TypeError):
        pass  # there is no such file


def with_runtime() -> str:
    """The engine that contains the runtime: this one or, if it is a delta, its base, which lies where `with_base` looks
    for it (runtime/format/base_engine.py). Ends the process with a message if there is no runtime."""
    if PathFinder.find_spec("runtime", [ENGINE]) is not None:
        return ENGINE
    base = read_manifest(ENGINE).get("base")
    if not isinstance(base, dict) or not isinstance(path := base.get("path"), str) or "\0" in path:
        sys.exit(refused(f"{ENGINE} has no runtime", "copy the engine again"))
    here, name = os.path.realpath(ENGINE), os.path.basename(path)
    recorded = os.path.realpath(os.path.join(here, path))
    for place in (recorded, os.path.join(os.path.dirname(here), name)):
        one_file = place.removesuffix(".engine") + ".icc"
        for found in (place, place[:-4] + ".engine" if place.endswith(".icc") else one_file):
            if read_manifest(found).get("digest", "") == base.get("digest"):
                whole = os.path.realpath(found)  # the folder above it if it is one target of several
                return whole if PathFinder.find_spec("runtime", [whole]) else os.path.dirname(whole)
    said = f"{ENGINE} is a delta of {recorded}, which is not there or is another"
    sys.exit(refused(said, f"put that engine beside it, as {name}"))


def refused(message: str, hint: str, code: int = 20) -> int:
    """Print why the engine does not run, and return the exit code."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    return code


def read_manifest(engine: str) -> dict:
    """The content of engine.json; {} if it cannot be read. Only a delta needs it here, so imports are inside."""
    import json
    from zipfile import BadZipFile, ZipFile

    archive, inner = (engine, "") if os.path.isfile(engine) else (os.path.dirname(engine), os.path.basename(engine))
    try:
        if os.path.isfile(archive):
            with ZipFile(archive) as files:
                found = json.loads(files.read(f"{inner}/engine.json" if inner else "engine.json"))
        else:
            with open(os.path.join(engine, "engine.json"), "rb") as file:
                found = json.load(file)
    except (OSError, ValueError, KeyError, BadZipFile):
        found = {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    gc.disable()  # until the command line is parsed, see `Cli.run`: collecting the imported objects takes milliseconds
    keep_clean()
    CODE = with_runtime()
    sys.path.insert(0, CODE)  # first, so that its own `runtime` is imported, whatever else is installed
    if os.path.isfile(CODE):
        from runtime import zipped_imports  # type: ignore[import-not-found]

        zipped_imports.install(CODE)
    try:
        from runtime.cli.commands import main  # type: ignore[import-not-found]
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:  # one of the few libraries that an engine does not contain
        needed = (error.name or "").partition(".")[0]
        sys.exit(refused(f"this needs {needed}, which is not installed", f"pip install {needed}", 3))
    sys.exit(main(sys.argv[1:], engine=ENGINE))
