"""Graph -> program: choose kernels, place values in the arena, list the steps."""
