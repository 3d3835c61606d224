"""The commands of `icc` that have a file of their own; cli.py gathers them."""
