"""The commands of `icc`, one per file; cli.py collects them."""
