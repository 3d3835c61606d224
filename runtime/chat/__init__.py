"""Conversations at a terminal, or through a pipe: `icc chat`."""
