"""A memory's proofs and contents survive a kill; old or foreign files are not trusted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from gati.adaptation.adaptation import Adaptation
from gati.adaptation.recall import Recall
from gati.adaptation.recall_file import MemoryKeeper, memory_file, memory_identity, network_identity
from gati.adaptation.recall_records import Looked
from gati.adaptation.settings import AdaptSettings
from gati.composition.load import open_served
from gati.engine.exits import BASE, Prediction
from gati.guard.auditor import RECALL
from gati.guard.proof import Proof
from gati.guard.standing import Standing
from gati.guard.standing_file import read_saved
from gati.model.preprocess import Preprocessing
from tests.adaptation.deployed import STRANGE, make_deployed, stream
from tests.conftest import REPOSITORY

AGREEMENT, DELTA = 0.9, 0.05
IDENTITY = memory_identity("0" * 64, AGREEMENT, DELTA)
HOUR_S = 3600.0


def answer(class_index: int) -> Prediction:
    return Prediction(class_index, torch.eye(3)[class_index] * 0.9 + 0.03, BASE, "v1", f"class {class_index}")


def pictures(seed: int = 0) -> Iterator[tuple[torch.Tensor, Prediction]]:
    """Three things that are easily told apart, one after the other, with noise."""
    random = np.random.default_rng(seed)
    while True:
        at = int(random.integers(3))
        x = np.full((1, 1, 8, 8), float(at)) + random.normal(0.0, 0.02, (1, 1, 8, 8))
        yield torch.from_numpy(x).float(), answer(at)


class Kept:
    """A memory over restarts, its files in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        identity: str = IDENTITY,
        later_s: float = 0.0,
        origin: str = "",
        elsewhere: bool = False,
    ) -> None:
        path = folder / "standing.json"
        self.standing = Standing(DELTA, path, now=lambda: 1e9 + later_s, origin=origin)
        self.standing.is_shared = elsewhere
        self.keeper = MemoryKeeper(self.standing, memory_file(path), identity, now=lambda: 1e9 + later_s)
        self.recall = Recall(
            AGREEMENT,
            self.standing.spending.next,
            10_000.0,
            leave=at_once,
            on_change=lambda *_: None,
            known=self.keeper.known(),
        )
        self.keeper.watch(self.recall)

    def learn(self, until: Callable[[], bool]) -> None:
        """Requests at one place, all of them audited."""
        for x, base in pictures():
            if until():
                return
            looked = self.recall.look(x, "gate")
            assert looked is not None
            self.recall.learn(looked, base, drawn=True)

    def save(self) -> None:
        self.standing.save()
        self.keeper.save()


def at_once(job: Callable[[], None]) -> bool:
    job()
    return True


def proven(folder: Path) -> Kept:
    made = Kept(folder)
    made.learn(lambda: made.recall.serves)
    made.save()
    return made


def test_it_goes_on_where_it_was_and_pays_for_no_second_proof(tmp_path: Path) -> None:
    before = proven(tmp_path)
    again = Kept(tmp_path)
    assert again.recall.state() == before.recall.state()
    assert again.standing.spending.used == before.standing.spending.used == 2
    for x, base in (next(pictures(seed)) for seed in range(20)):
        seen, known = look_alone(again, x), look_alone(before, x)
        assert seen is not None and known is not None and seen.seen is not None and known.seen is not None
        assert seen.confident == known.confident
        assert [each.would_answer for each in seen.intents] == [each.would_answer for each in known.intents]
        assert seen.seen.answer.class_index == base.class_index
        assert seen.seen.answer.class_name == base.class_name
        np.testing.assert_allclose(seen.seen.features, known.seen.features, atol=1e-5)


def test_a_scene_that_began_before_a_restart_still_needs_evidence_of_its_own(tmp_path: Path) -> None:
    """The camera turned shortly before, and what is remembered of the new view was wrong each time."""
    before = proven(tmp_path)
    random = np.random.default_rng(1)
    turned = np.where(random.random((1, 1, 8, 8)) < 0.5, -9.0, 9.0)
    views = [torch.from_numpy(turned + random.normal(0.0, 0.02, turned.shape)).float() for _ in range(105)]
    for x in views[:5]:
        looked = look_alone(before, x)
        assert looked is not None and looked.seen is not None
        before.recall.learn(looked, answer((looked.seen.answer.class_index + 1) % 3), drawn=False)
    before.save()
    for kept in (before, Kept(tmp_path)):
        answered = [look_alone(kept, x) for x in views[5:]]
        assert not any(each is None or each.confident for each in answered)


@pytest.mark.parametrize(
    "why", ["old", "from the future", "of another network", "lost", "damaged", "half", "of other lengths"]
)
def test_what_cannot_be_believed_begins_anew_and_costs_a_share_of_delta(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    proven(tmp_path)
    path = tmp_path / "standing-memory.npz"
    later_s = {"old": HOUR_S + 1.0, "from the future": -HOUR_S}.get(why, 0.0)
    identity = memory_identity("1" * 64, AGREEMENT, DELTA) if why == "of another network" else IDENTITY
    if why == "lost":
        path.unlink()
    elif why == "damaged":
        path.write_bytes(b"no archive")
    elif why == "half":
        path.write_bytes(path.read_bytes()[:2000])
    elif why == "of other lengths":
        with np.load(path) as arrays:
            kept = dict(arrays)
        np.savez(path, **{**kept, "wrong": kept["wrong"][1:]})
    again = Kept(tmp_path, identity=identity, later_s=later_s)
    proof = again.recall.proof
    assert not again.recall.serves and again.recall.places == 0
    assert proof is not None and proof.audits == 0 and again.standing.spending.used == 4
    unread = why in ("lost", "damaged", "half", "of other lengths")
    assert (f"memory starts empty: {path}: " in caplog.text) == unread


def test_a_memory_that_was_never_saved_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that was killed within half a minute said at its restart that there was no such file."""
    before = Kept(tmp_path)
    before.learn(lambda: before.recall.places > 0)
    before.standing.save()
    assert Kept(tmp_path).recall.places == 0 and not caplog.text


def test_answers_of_other_preprocessing_or_with_other_names_are_of_another_network() -> None:
    """The weights are the same: memory gave the answers of before, by their names of before, for an hour."""

    def identity(**different: Any) -> str:
        made_of = {
            "checkpoint_sha256": "0" * 64,
            "preprocessing": Preprocessing(),
            "class_names": ("cat", "dog"),
        }
        return network_identity(cast(Any, SimpleNamespace(**{**made_of, **different})))

    others = (
        {"checkpoint_sha256": "1" * 64},
        {"preprocessing": Preprocessing(mean=(0.5,) * 3)},
        {"preprocessing": Preprocessing(crop=8)},
        {"class_names": ("dog", "cat")},
        {"class_names": None},
    )
    assert identity() == identity(class_names=["cat", "dog"])
    assert len({identity(), *(identity(**each) for each in others)}) == 1 + len(others)


def test_what_was_remembered_of_another_source_is_dropped(tmp_path: Path) -> None:
    before = Kept(tmp_path, origin="gate")
    before.learn(lambda: before.recall.serves)
    before.save()
    assert Kept(tmp_path, origin="gate").recall.serves
    other = Kept(tmp_path, origin="yard")
    assert other.standing.elsewhere and not other.recall.serves and other.recall.places == 0
    other.standing.save()  # and dies before its contents are saved
    again = Kept(tmp_path, origin="yard")
    assert not again.recall.serves and again.recall.places == 0


def test_what_the_state_cannot_have_come_to_is_not_believed(tmp_path: Path) -> None:
    proven(tmp_path)
    path = tmp_path / "standing.json"
    document = json.loads(path.read_text())
    alone, shared = document["parts"]["memory"]["state"]["ladders"]
    assert Kept(tmp_path).recall.serves
    for ladders in (
        [{**alone, "allowed": [50.0, 50.0, 50.0]}, shared],
        [{**alone, "ladder": {**alone["ladder"], "left": [-1, 0, 0]}}, shared],
        [shared, alone],
        [alone],
    ):
        document["parts"]["memory"]["state"]["ladders"] = ladders
        path.write_text(json.dumps(document))
        assert not Kept(tmp_path).recall.serves


def look_alone(kept: Kept, x: torch.Tensor) -> Looked | None:
    return kept.recall.look(x, "gate", alone=True)


def test_what_was_withdrawn_stays_so(tmp_path: Path) -> None:
    before = proven(tmp_path)
    looked = next(each for x, _ in pictures() if (each := look_alone(before, x)) and each.confident)
    assert looked.seen is not None
    while before.recall.serves:
        before.recall.learn(looked, answer((looked.seen.answer.class_index + 1) % 3), drawn=True)
    before.save()
    assert not Kept(tmp_path).recall.serves


@pytest.mark.slow
def test_a_killed_process_forgets_no_proof(tmp_path: Path) -> None:
    """`kill -9` of a real process in the middle of requests: what it had written is whole."""
    program = """
import sys
from pathlib import Path
from tests.adaptation.test_recall_file import Kept
made = Kept(Path(sys.argv[1]))
made.learn(lambda: made.recall.serves)
made.save()
print(made.standing.spending.used, flush=True)
while True:
    made.save()
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None and process.stdout.readline().strip() == "2"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    again = Kept(tmp_path)
    assert again.recall.serves and again.recall.places == 1 and again.standing.spending.used == 2


def test_places_that_were_not_heard_of_for_longest_are_forgotten() -> None:
    recall = Recall(AGREEMENT, lambda: 0.05, 10_000.0, leave=at_once, on_change=lambda *_: None, places=2)
    x, base = next(pictures())
    for place in ("gate", "yard", "gate", "hall"):
        looked = recall.look(x, place)
        assert looked is not None
        recall.learn(looked, base, drawn=True)
    assert recall.places == 2 and recall.forgotten == 1
    assert set(recall.remembered().places) == {"gate", "hall"}


STREAMING = """
import os, signal, sys
from pathlib import Path
from gati.adaptation.adaptation import Adaptation
from gati.composition.load import open_served
from tests.adaptation.test_recall_file import PLACED, showing
told = []
adaptation = Adaptation(
    open_served(sys.argv[1]), PLACED, standing=Path(sys.argv[2]), deterministic=True,
    on_change=lambda change: told.append(change.kind),
)
for number, x in enumerate(showing()):
    adaptation.answer(x, time_s=0.1 * number, place="camera")
    if "recalling" in told:
        os.kill(os.getpid(), signal.SIGKILL)
"""

PLACED = AdaptSettings(interval_s=1e9, accuracy=0.9, falls_to=0.0, audit_budget=0.5, rest=False)


def showing() -> Iterator[torch.Tensor]:
    """Two scans of strange digits, each for some time, with a little noise."""
    scans = stream(STRANGE, 2, seed=3)
    noise = torch.Generator().manual_seed(0)
    for number in range(2000):
        yield scans[number // 40 % 2][None] + 0.005 * torch.randn((1, 1, 8, 8), generator=noise)


@pytest.mark.slow
def test_a_stream_that_is_killed_recalls_at_once_when_it_goes_on(tmp_path: Path) -> None:
    """`kill -9` at the moment when memory is proven: the next run answers from it soon."""
    library = make_deployed(tmp_path).library.directory
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    path = tmp_path / "standing.json"
    killed = subprocess.run(
        [sys.executable, "-c", STREAMING, str(library), str(path)], env=environment, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    with Adaptation(open_served(library), PLACED, standing=path, deterministic=True) as adaptation:
        answers = [
            adaptation.answer(x, time_s=0.1 * at, place="camera")
            for at, x in zip(range(30), showing(), strict=False)
        ]
    assert np.mean([each.prediction.exit == RECALL for each in answers]) > 0.5


def test_two_processes_prove_one_memory_by_shares_of_delta_of_their_own(tmp_path: Path) -> None:
    """Both went on with one proof. Neither waits for the other one to end."""
    other = Kept(tmp_path)
    other.learn(lambda: proof_of(other).audits >= proof_of(other).required - 5)
    other.save()
    mine = Kept(tmp_path, elsewhere=True)
    assert proof_of(mine).audits == 0 and proof_of(mine).delta < proof_of(other).delta
    assert mine.standing.spending.used == 4
    mine.learn(lambda: mine.recall.serves)
    other.save()
    mine.standing.take_in(read_saved(tmp_path / "standing.json", 1e9), lambda *_: None)
    assert mine.recall.serves


def test_what_another_process_withdrew_of_a_memory_is_withdrawn_once_that_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = proven(tmp_path)
    mine = Kept(tmp_path, elsewhere=True)
    looked = next(each for x, _ in pictures() if (each := look_alone(other, x)) and each.confident)
    for _ in range(1000):
        other.recall.lost(looked, drawn=True)
    other.save()
    assert mine.recall.serves and not other.recall.serves
    mine.standing.take_in(read_saved(tmp_path / "standing.json", 1e9), lambda *_: None)
    assert not mine.recall.serves and "memory answers less" in caplog.text


def proof_of(kept: Kept) -> Proof:
    assert kept.recall.proof is not None
    return kept.recall.proof
