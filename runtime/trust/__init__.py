"""Verifies who made an engine, by signatures of its manifest."""
