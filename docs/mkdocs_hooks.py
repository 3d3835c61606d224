"""What `make docs` adds to the pages of docs/: benchmarks/results, as the repository has it."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SHOWN = ("*.md", "*.svg", "*.webp")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add benchmarks/results as the same folder of the site."""
    root = Path(config.config_file_path).parent
    results = [path for pattern in SHOWN for path in sorted((root / "benchmarks" / "results").glob(pattern))]
    for path in results:
        files.append(File.generated(config, str(path.relative_to(root)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ stay within the site; results lose links to what the site lacks."""
    if page.file.src_uri.startswith("benchmarks/"):
        return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
    return markdown.replace("](../benchmarks/", "](benchmarks/")
