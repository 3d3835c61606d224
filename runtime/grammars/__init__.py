"""Grammars: what the text of a request may be. The one home of llguidance in the runtime of an engine."""
