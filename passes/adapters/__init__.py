"""Passes that add slots for adapters, which are loaded at run time."""
