"""Why a trial fails while the others of its group go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gati.errors import DataError, StorageError, one_line
from gati.exploration.memory import is_lack_of_memory
from gati.types import TrialId

GAVE_NAN = "its training gave NaN: check the hidden outputs of that block"


@contextmanager
def noting_failure(failures: dict[TrialId, str], trial_id: TrialId) -> Iterator[None]:
    """Inside the context, an exception ends it as the failure of that trial: predictors may be user code.

    Inputs that cannot be read, too little memory and a GPU that has failed are not its fault: they raise.
    """
    try:
        yield
    except (DataError, StorageError, MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # after an error of CUDA, every call on that GPU raises
        if "CUDA error" in str(error) or any(map(is_lack_of_memory, (error, error.__cause__))):
            raise
        failures[trial_id] = one_line(error)
