"""`icc bench serve`: measures any OpenAI endpoint from outside. Standard library and numpy only."""
