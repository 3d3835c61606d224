"""Speculative decoding: drafters guess tokens, a step verifies them, and a ledger sees to it that nothing is lost."""
