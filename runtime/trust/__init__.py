"""Who made an engine: signatures of its manifest."""
