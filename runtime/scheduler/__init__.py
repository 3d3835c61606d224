"""Continuous batching over a paged KV cache: a pure state machine (stdlib only; no threads, clock or logging)."""
