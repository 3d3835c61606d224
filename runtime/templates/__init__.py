"""Chat templates: found in an engine, and rendered. The one home of minijinja."""
