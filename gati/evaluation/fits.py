"""Whether data fit the network, before anything is measured on them."""

from __future__ import annotations

from gati.engine.engine import Engine
from gati.errors import DataError
from gati.model.sequence import Data


def check_fit(engine: Engine, inputs: Data, what: str) -> None:
    """Check that there are inputs, and the first one. Raises DataError; `what` they are is in its message."""
    if len(inputs) == 0:
        raise DataError(f"the {what} is empty; give at least one input")
    first = inputs.images([0])  # a file that cannot be read says so itself
    try:
        engine.checked(first)
    except DataError as error:
        reason = str(error).partition(";")[0]
        raise DataError(
            f"{what}: {inputs.name} does not fit: {reason}; give inputs like those of gati explore"
        ) from error
