"""Graph -> program: steps with their operands placed, the memory plan, and the profile that a back end provides."""
