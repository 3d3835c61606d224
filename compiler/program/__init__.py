"""Graph -> program: steps with their operands placed, the memory plan, and what a backend must say for it."""
