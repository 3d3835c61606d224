"""`python -m icc`: the command `icc`."""

from .compiler.cli import main

if __name__ == "__main__":
    main(prog_name="icc")
