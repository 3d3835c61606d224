"""Graph passes. Each is a frozen dataclass in its own file; pipelines.py puts them in order."""
