"""Entering in the ledger that the agreement of a composition on some data was shown.

Whoever measures several compositions on the same inputs and then certifies the best of them on these has
chosen by them. `gati certify` says so, since it knows who was measured there (`gati.composition.ledger`).
"""

from __future__ import annotations

import hashlib
import logging

import numpy as np

from gati.composition.engines import bound
from gati.composition.ledger import Ledger, composition_identity
from gati.composition.load import Served
from gati.errors import LibraryError, StorageError
from gati.model.sequence import Data

_log = logging.getLogger(__name__)


def enter_look(served: Served, inputs: Data) -> None:
    """Enter that a composition is measured on these inputs; if that fails, a warning is logged.

    Inputs that explore has used are left out: they prove nothing anyway.
    """
    if not served.composition.exits:
        return
    record = served.library.input_record()
    seen = np.empty(0, np.uint64) if record is None else record.seen
    new = np.setdiff1d(inputs.identities, seen)
    if not len(new):
        return
    try:
        identity = composition_identity(served.library, bound(served.library, served.composition))
        Ledger(served.library.directory).look(identity, hashlib.sha256(new.tobytes()).hexdigest(), new)
    except (LibraryError, StorageError) as error:
        _log.warning("certificates will not say that this data was looked at: %s", error)
