"""Several launches of a decode step as one kernel whose programs stay: who does which tile, and what waits for what."""
