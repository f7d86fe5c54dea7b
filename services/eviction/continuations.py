"""The loaded continuation model; reloaded whenever its folder changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from gati.errors import EvictError, UnavailableError
from gati.evict.predict.continuation_stored import ContinuationPredictor, load_continuation
from gati.evict.trace.dialogues import Prompts

_log = logging.getLogger("gati.eviction")


class Continuations:
    """Predicts with the latest readable model in `folder`; without a folder (None) there is no model."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._model: tuple[ContinuationPredictor, str] | None = None
        self._seen = ""
        self._failed = ""
        self._told: tuple[str, str] | None = None  # the last failure that was logged

    @property
    def ready(self) -> bool:
        """Whether a model is loaded, or none is expected."""
        return self._folder is None or self._model is not None

    @property
    def quick(self) -> bool:
        """Whether a prediction takes less time than waking a thread; also true without a model."""
        return self._model is None or self._model[0].quick

    def look(self) -> None:
        """Load the model if the folder has a new one; a damaged one is ignored.

        If its files cannot be read for another reason, such as too many open ones, the next look tries again.
        """
        if self._folder is None:
            return
        token = _token(self._folder)
        if token in (self._seen, self._failed):
            return
        try:
            model = load_continuation(self._folder)
        except EvictError as error:
            if not _unread(error):
                self._failed = token
            if self._told != (token, str(error)):
                self._told = token, str(error)
                _log.warning(
                    "cannot read the new continuation model; the loaded one, if any, stays in use",
                    extra={"reason": str(error)},
                )
            return
        name = model.digest()[:12]
        self._model, self._seen = (model, name), token
        _log.info("continuation model loaded", extra={"version": name})

    def predict(self, prompts: Sequence[Prompts]) -> tuple[list[float], str]:
        """Return the probabilities that conversations continue, and the version that predicted them.

        Raises `UnavailableError` if no model is loaded.
        """
        loaded = self._model
        if loaded is None:
            why = "no model can be read yet" if self._folder else "start it with --continuation DIR"
            raise UnavailableError(f"this server has no continuation model: {why}")
        model, name = loaded
        return model.predict(prompts).tolist(), name


def _unread(error: BaseException) -> bool:
    """Whether a file could not be read, rather than that its content is wrong."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return cause is not None


def _token(folder: Path) -> str:
    """Return a value that changes when one of the files does."""
    found = []
    for path in sorted(folder.glob("continuation.*")):
        try:
            status = path.stat()
        except OSError:  # being replaced at this moment; the next look finds it
            continue
        found.append(f"{path.name} {status.st_mtime_ns} {status.st_size} {status.st_ino}")
    return "\n".join(found)
