"""Sphinx: `make docs` writes build/docs."""

project = "icc"
author = copyright = "The icc developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
myst_heading_anchors = 2
autodoc_typehints = "description"
autodoc_mock_imports: list[str] = []
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_missing"]
