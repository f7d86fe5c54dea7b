"""The adaptation of a model that is killed at each change of its repository; `test_killed` runs this.

    python -m tests.services.killed_adaptation FOLDER

It retrains once for real and publishes version 1. The caches found then are published again in processes that
die at their first change of the repository, at their second, and so on, since training them changes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import gati.adaptation.renewal as renewal
from gati.adaptation.deployments import Deployments
from gati.composition.load import Served
from gati.engine.exits import BASE
from gati.model import flatten
from gati.samples.record import Record
from gati.samples.store import RecordStore
from gati.versions.repository import ModelRepository
from services.adaptation.model import ModelAdaptation
from services.adaptation.settings import AdaptationSettings, AdaptedModel
from tests.adaptation.deployed import STRANGE, make_deployed, stream
from tests.services.dying import each_death
from tests.sharing import trace_once

MODEL = "digits"
SAMPLES = 600
LATER_S = 4000.0  # until what was left unfinished is swept up


def main() -> int:
    """Print the changes at which it was killed, and the versions that were published then."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # what a killed process has written is not lost
    flatten.export_program = trace_once(flatten.export_program)  # each process opens the same network
    folder = Path(sys.argv[1])
    served = make_deployed(folder)
    sample(served, folder / "records.db")
    train_once()
    model = AdaptedModel(
        name=MODEL,
        library=served.library.directory,
        composition="default",
        records=f"sqlite:///{folder}/records.db",
        repository=str(folder / "versions"),
    )
    settings = AdaptationSettings(models=(model,), window_inputs=SAMPLES)

    def renewed(tell: Callable[[str], None] = lambda line: None) -> Any:
        adaptation = ModelAdaptation(model, settings)
        adaptation.look(asked=True)
        status = adaptation.status()
        adaptation.close()
        tell(f"{status.outcome} {status.version}")
        return status

    first = renewed()
    assert (first.outcome, first.version) == ("activated", 1), first
    assert first.began_s is not None and time.time() - 600.0 < first.began_s < first.changed_s, first
    again = ModelAdaptation(model, settings)
    again.look()
    assert again._published.number == 1 and again._serving.number == 0, "samples say that it does not answer"
    again.close()
    shutil.copytree(folder / "versions", folder / "before")
    found = []
    for death in each_death(folder / "versions", renewed):
        repository = ModelRepository(folder / "versions")
        numbers = [version.version for version in repository.versions(MODEL)]
        assert numbers in ([1], [1, 2]), (death, numbers)
        assert repository.active(MODEL) in numbers, death
        whole(served, repository, numbers, folder / "opened")
        again = ModelAdaptation(model, settings)  # as after a restart
        assert again.status().version == numbers[-1] == repository.active(MODEL), (death, again.status())
        if not death.change:
            assert death.told == ["activated 2"], death
        again.look(asked=True)
        after = again.status()
        again.close()
        assert (after.outcome, after.version) == ("activated", numbers[-1] + 1), (death, after)
        assert [version.version for version in repository.versions(MODEL)] == [*numbers, after.version]
        ModelRepository(folder / "versions", clock=lambda: time.time() + LATER_S).collect_garbage(MODEL)
        left = [path.name for path in (folder / "versions" / MODEL / "temporary").iterdir()]
        assert not left, (death, left)
        found.append((death.change, numbers))
        shutil.rmtree(folder / "versions")
        shutil.copytree(folder / "before", folder / "versions")
    print(json.dumps(found))
    return 0


def sample(served: Served, path: Path) -> None:
    """Store samples of digits that the caches were not trained on, as a service that serves would."""
    x = stream(STRANGE, SAMPLES, seed=1)
    found, now_s = [], time.time() - 60.0
    for at, (own, base) in enumerate(zip(served.engine(x), served.engine.base(x), strict=True)):
        hit = own.exit != BASE
        found.append(
            Record(
                x[at].numpy(), "input", base.class_index, now_s + at / 100, MODEL, source="default",
                exit=own.exit if hit else None,
                agreed=own.class_index == base.class_index if hit else None,
                probabilities=base.probabilities.numpy(),
            )
        )  # fmt: skip
    with RecordStore.open(f"sqlite:///{path}") as store:
        store.add(found)


def train_once() -> None:
    """Have `retrain` find the same caches every time, after the first."""
    retrain, found = renewal.retrain, list[Any]()

    def known(*arguments: Any, **options: Any) -> Any:
        if not found:
            made = retrain(*arguments, **options)
            first = max(0, made.aimed - 1)  # two settings are as good as ten, each of which is a file
            found.append(replace(made, settings=made.settings[first : first + 2], aimed=made.aimed - first))
        return found[0]

    renewal.retrain = known


def whole(served: Served, repository: ModelRepository, numbers: list[int], folder: Path) -> None:
    """Check that every version opens, weights and all, and answers."""
    folder.mkdir()
    deployments = Deployments(served, repository, MODEL, folder)
    x = stream(STRANGE, 4, seed=2)
    for number in numbers:
        opened = deployments.open(number).served.engine
        assert opened.exits and len(opened(x)) == 4
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
