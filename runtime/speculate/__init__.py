"""Speculative decoding: drafters guess tokens, a step verifies them, and a ledger limits the time that wrong guesses
may cost."""
