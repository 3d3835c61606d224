"""How weights are stored: one file per storage format."""
