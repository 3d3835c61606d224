"""Chat templates: reads them from an engine and renders them. Only this package uses minijinja."""
