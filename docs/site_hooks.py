"""MkDocs hooks: pages from elsewhere in the repository join the site, links to other files become text.

GitHub shows the same Markdown in place, so links are written for the repository and rewritten here.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

REPOSITORY = Path(__file__).resolve().parent.parent
# Pages of the site, by the file of the repository that they show.
ELSEWHERE = {
    "ARCHITECTURE.md": "architecture.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/deploy/README.md": "deployment.md",
}
SOURCES = {page: source for source, page in ELSEWHERE.items()}
_LINK = re.compile(r"(?<!!)\[([^]]+)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that live outside `docs/`."""
    for source, page in ELSEWHERE.items():
        text = (REPOSITORY / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between files of the repository to links between pages of the site."""
    uri = page.file.src_uri
    source = SOURCES.get(uri, f"docs/{uri}")
    return _LINK.sub(lambda link: _rewritten(link[1], link[2], source, uri), markdown)


def _rewritten(text: str, target: str, source: str, uri: str) -> str:
    path, hash_sign, anchor = target.partition("#")
    if not path or "://" in path:
        return f"[{text}]({target})"
    named = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    shown = ELSEWHERE.get(named, named.removeprefix("docs/") if named.startswith("docs/") else None)
    if shown is None:  # a file of the repository that is no page
        return text
    relative = posixpath.relpath(shown, posixpath.dirname(uri) or ".")
    return f"[{text}]({relative}{hash_sign}{anchor})"
