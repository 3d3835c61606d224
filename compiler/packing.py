"""Converts engines between a directory and one file. The engine is verified before it is written."""

from __future__ import annotations

from pathlib import Path

from ..runtime.format.load import read_targets, verify_all
from ..runtime.format.open_container import open_container
from ..runtime.format.present import ONE_FILE, engine_name
from .engine.atomic import directory, engine_file, engine_output
from .engine.oci import engine_in, is_layout, write_layout
from .engine.output import check_output
from .engine.packing import write_directory, write_one_file
from .errors import UsageError


def pack_engine(engine: Path, output: Path, force: bool = False) -> None:
    """Write an engine to one file. EngineFormatError or a subclass if it is damaged; OutputExistsError and WriteError
    as in a compile; UsageError if the output does not have the suffix of one-file engines."""
    if output.suffix != ONE_FILE:
        raise UsageError(f"-o {output}: a one-file engine's name ends in {ONE_FILE}", f"-o {output.stem}{ONE_FILE}")
    check_output(output, force)
    engine = engine_in(engine)
    verify_all(engine)
    with engine_file(output) as file:
        write_one_file(open_container(engine), file)


def pack_layout(engine: Path, output: Path, force: bool = False) -> None:
    """Write an engine as an OCI image layout. Raises as `pack_engine`; --force replaces only layouts."""
    check_output(output, force, is_layout, "--oci")
    engine = engine_in(engine)
    [(_, manifest), *_] = verify_all(engine)
    digest = (read_targets(engine) or manifest).digest
    with directory(output) as stage:
        write_layout(open_container(engine), stage, f"{engine_name(output.resolve())}{ONE_FILE}", digest)


def unpack_engine(engine: Path, output: Path, force: bool = False) -> None:
    """Write an engine to a directory. Raises as `pack_engine`, but UsageError if the output has the suffix of one-file
    engines."""
    if output.suffix == ONE_FILE:
        raise UsageError(f"-o {output}: {ONE_FILE} is the suffix of one-file engines", "give another name")
    check_output(output, force)
    engine = engine_in(engine)
    verify_all(engine)
    with engine_output(output) as stage:
        write_directory(open_container(engine), stage)
