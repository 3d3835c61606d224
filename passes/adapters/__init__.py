"""Passes that make room for adapters, which come at run time."""
