"""Whether a network still has the weights that a cache library was made from; needs neither torch nor it."""

from __future__ import annotations

from gati.errors import LibraryError
from gati.exploration.library import Library


def check_same_weights(library: Library, sha256: str) -> None:
    """Raise `LibraryError` unless `sha256`, of the network's weights now, is that of the library."""
    manifest = library.manifest
    if sha256 != manifest.checkpoint_sha256:
        raise LibraryError(
            f"the library in {library.directory} was made from weights {manifest.checkpoint_sha256[:12]}, "
            f"but {manifest.checkpoint_path or manifest.model_source} now has {sha256[:12]}; restore the old "
            "checkpoint, or run gati explore again with another --out"
        )
