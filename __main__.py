"""The command `icc`, also as `python -m icc`."""

import sys


def main() -> None:
    """Run the command; Ctrl-C ends it without a traceback also while it is being imported."""
    try:
        from .compiler.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run(prog_name="icc")


if __name__ == "__main__":
    main()
