"""New scenes and places are known at once, for all requests of a moment, and over restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gati.adaptation.adaptation import Adaptation
from gati.adaptation.follow import FollowUp
from gati.adaptation.recall import Recall
from gati.adaptation.recall_records import Looked
from gati.adaptation.recall_scenes import Scenes
from gati.adaptation.settings import AdaptSettings
from gati.composition.load import open_served
from gati.engine.exits import BASE, Prediction
from gati.guard.proof import Spending
from tests.adaptation.deployed import STRANGE, make_deployed, stream
from tests.adaptation.test_recall_file import HOUR_S, Kept, answer, at_once

NEW = 20  # requests of a new scene that are protected


class Camera:
    """Pictures of one view, with noise, all of one class."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.turn()

    def turn(self) -> None:
        """Show another view."""
        self._view = np.where(self._random.random((1, 1, 8, 8)) < 0.5, -9.0, 9.0)

    def __call__(self) -> torch.Tensor:
        return torch.from_numpy(self._view + self._random.normal(0.0, 0.02, self._view.shape)).float()


def ask(recall: Recall, camera: Camera, place: str, requests: int) -> int:
    """Answer so many requests, one by one; returns how many were of a new scene."""
    new = 0
    for _ in range(requests):
        looked = look(recall, camera, place)
        new += looked.new_scene
        recall.learn(looked, answer(0), drawn=True)
    return new


def look(recall: Recall, camera: Camera, place: str) -> Looked:
    looked = recall.look(camera(), place)
    assert looked is not None
    return looked


def learned(kept: Kept, *places: str) -> Kept:
    for number, place in enumerate(places):
        ask(kept.recall, Camera(number), place, 150)
    return kept


def memory(*, alone: bool = True) -> Recall:
    return Recall(0.9, Spending(0.05).next, 10_000.0, leave=at_once, on_change=lambda *_: None, alone=alone)


# One moment ------------------------------------------------------------------------------------------------


def test_all_requests_of_the_moment_when_a_camera_turns_are_of_one_new_scene() -> None:
    """A batch of 64 was answered as if nothing had happened, and then began 64 scenes."""
    recall, gate = memory(), Camera(0)
    ask(recall, gate, "gate", 300)
    gate.turn()
    batch = [look(recall, gate, "gate") for _ in range(64)]
    assert all(each.new_scene and each.scene is None for each in batch)
    for each in batch:
        recall.learn(each, answer(1), drawn=True)
    assert {each.scene for each in (look(recall, gate, "gate") for _ in range(10))} == {1}
    assert not look(recall, gate, "gate").new_scene, "64 audits are enough"


def test_a_batch_of_few_leaves_the_rest_of_the_new_requests_to_the_next() -> None:
    recall, gate = memory(), Camera(0)
    ask(recall, gate, "gate", 300)
    gate.turn()
    for each in [look(recall, gate, "gate") for _ in range(4)]:
        recall.learn(each, answer(1), drawn=True)
    assert NEW - 4 <= ask(recall, gate, "gate", 40) <= NEW


@pytest.mark.parametrize("alone", [True, False])
def test_a_camera_that_turns_is_noticed_also_where_memory_answers_nothing(alone: bool) -> None:
    """Its pictures have any class: no distance was ever checked, so none was a jump."""
    recall, gate, random = memory(alone=alone), Camera(0), np.random.default_rng(0)
    new = []
    for at in range(400):
        if at == 300:
            gate.turn()
        looked = look(recall, gate, "gate")
        new.append(looked.new_scene)
        recall.learn(looked, of_ten(int(random.integers(10))), drawn=True)
    assert not recall.serves and not any(new[:300])
    assert all(new[300:320]) and not any(new[321:])


def of_ten(class_index: int) -> Prediction:
    return Prediction(class_index, torch.eye(10)[class_index] * 0.9 + 0.01, BASE, "v1", None)


def test_no_jump_is_seen_before_anything_is_learned() -> None:
    """The first inputs of a place are all far from what little is remembered."""
    recall, gate = memory(), Camera(0)
    for at in range(59):
        gate.turn()
        looked = look(recall, gate, "gate")
        recall.learn(looked, answer(at % 2), drawn=True)
        assert not looked.new_scene


def test_many_cameras_may_be_new_at_once() -> None:
    """After a hundred, the first ones were taken for known."""
    scenes = Scenes(300)
    scenes.settle()
    begun = {}
    for place in map(str, range(250)):
        assert scenes.show(place, scenes.of(place, None, None))
        begun[place] = scenes.learned(place, None, scenes.lookups)
    assert all(scenes.show(place, scene) for place, scene in begun.items())


def test_another_turn_begins_another_scene() -> None:
    scenes = Scenes(64)
    scenes.settle()
    first = scenes.learned("gate", None, number(scenes))
    assert scenes.learned("yard", None, number(scenes)) != first
    assert scenes.learned("gate", None, number(scenes)) not in (first, first + 1)


def number(scenes: Scenes) -> int:
    assert scenes.show("gate", None)
    return scenes.lookups


def test_of_endless_new_scenes_the_latest_are_counted() -> None:
    """As where each picture is noise: its requests are protected, and no list grows."""
    scenes = Scenes(3)
    scenes.settle()
    for _ in range(500):
        scenes.learned("gate", None, number(scenes))
    assert [scene for scene, _ in scenes.new] == list(range(398, 501))


def test_of_endless_places_that_begin_scenes_those_forgotten_leave_only_names() -> None:
    """Clients choose them. The latest tell the next run that there are too many for places."""
    scenes = Scenes(3)
    scenes.settle()
    for place in "abcdefgh":
        scenes.learned(place, None, number(scenes))
        scenes.forget(place)
    assert not scenes._begun and scenes.names == ("e", "f", "g", "h")


@pytest.mark.parametrize(("new", "wanted"), [([], 8), ([(9, 2)], 10)])
def test_a_scene_that_begins_after_a_restart_is_none_of_before(
    new: list[tuple[int, int]], wanted: int
) -> None:
    """It would be answered by what was checked in the other one."""
    scenes = Scenes(64)
    scenes.resume({"gate": 3}, [0, 7, 3], new)
    assert scenes.learned("gate", None, number(scenes)) == wanted


@pytest.mark.slow
def test_the_first_picture_that_a_stream_shows_of_a_new_scene_is_not_answered_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the second one was: the place had to show the first to be known as new."""
    told: list[bool] = []
    decide = FollowUp.decide

    def told_of(self: FollowUp, *given: Any, looked: Looked, **options: Any) -> Any:
        told.append(looked.new_scene)
        return decide(self, *given, looked=looked, **options)

    monkeypatch.setattr(FollowUp, "decide", told_of)
    settings = AdaptSettings(interval_s=1e9, accuracy=0.9, falls_to=0.0, audit_budget=1.0, rest=False)
    library = make_deployed(tmp_path).library.directory
    with Adaptation(open_served(library), settings, deterministic=True) as adaptation:
        for at, x in enumerate(shown()):
            adaptation.answer(x, time_s=0.1 * at, place="camera")
    assert told[:300] == [False] * 300 and told[300]


def shown() -> Iterator[torch.Tensor]:
    """One scan for long, and then another thing, far from it."""
    scan = stream(STRANGE, 1, seed=3)[0][None]
    noise = torch.Generator().manual_seed(0)
    for at in range(302):
        yield scan + 0.005 * torch.randn(scan.shape, generator=noise) + 50.0 * (at >= 300)


# Restarts --------------------------------------------------------------------------------------------------


def test_a_camera_added_while_the_server_was_down_is_new_though_memory_is_too_old(tmp_path: Path) -> None:
    """Proofs of caches are believed for a week: they answered there at once."""
    learned(Kept(tmp_path), "gate", "yard").save()
    again = Kept(tmp_path, later_s=2 * HOUR_S)
    assert again.recall.places == 0
    assert ask(again.recall, Camera(7), "hall", 40) in (NEW, NEW + 1)
    assert again.recall.names == ("gate", "yard", "hall")
    again.save()
    assert Kept(tmp_path, later_s=4 * HOUR_S).recall.names == ("gate", "yard", "hall")


@pytest.mark.parametrize("killed", [False, True])
def test_a_camera_that_turned_while_memory_became_too_old_is_noticed(tmp_path: Path, killed: bool) -> None:
    """Its name alone let caches answer there that were proven on what it showed before."""
    learned(Kept(tmp_path), "gate").save()
    again = Kept(tmp_path, later_s=2 * HOUR_S)
    if killed:
        assert ask(again.recall, Camera(7), "gate", 6) == 6
        again.standing.save()
        assert again.recall.names == (), "it is still new"
        again = Kept(tmp_path, later_s=4 * HOUR_S)
    assert ask(again.recall, Camera(7), "gate", 40) in (NEW, NEW + 1)
    again.save()
    soon = Kept(tmp_path, later_s=(4 if killed else 2) * HOUR_S + 60.0)
    assert ask(soon.recall, Camera(7), "gate", 5) == 0


@pytest.mark.parametrize("saved", ["all", "proofs only"])
def test_a_kill_within_the_first_requests_of_a_camera_leaves_it_new(tmp_path: Path, saved: str) -> None:
    before = learned(Kept(tmp_path), "gate")
    before.save()
    assert ask(before.recall, Camera(7), "hall", 6) == 6
    if saved == "all":
        before.save()
    else:  # the contents are as old as the last time that they were due
        before.standing.save()
    again = Kept(tmp_path)
    assert again.recall.places == (2 if saved == "all" else 1)
    left = NEW - 6 if saved == "all" else NEW
    assert ask(again.recall, Camera(7), "hall", 40) in (left, left + 1)
    assert ask(again.recall, Camera(0), "gate", 5) == 0, "what it showed is known"


def test_a_camera_that_was_still_new_when_memory_was_dropped_begins_anew(tmp_path: Path) -> None:
    before = learned(Kept(tmp_path), "gate")
    ask(before.recall, Camera(7), "hall", 6)
    before.save()
    again = Kept(tmp_path, later_s=2 * HOUR_S)
    assert ask(again.recall, Camera(7), "hall", 40) in (NEW, NEW + 1)


def test_a_place_that_is_still_new_is_no_known_one_right_after_a_restart(tmp_path: Path) -> None:
    before = learned(Kept(tmp_path), "gate")
    ask(before.recall, Camera(7), "hall", 6)
    before.save()
    again = Kept(tmp_path)
    again.save()  # and dies before it is asked
    assert ask(Kept(tmp_path, later_s=2 * HOUR_S).recall, Camera(7), "hall", 40) in (NEW, NEW + 1)


def test_files_of_before_names_and_new_scenes_were_kept_are_read(tmp_path: Path) -> None:
    before = learned(Kept(tmp_path), "gate")
    before.save()
    path, contents = tmp_path / "standing.json", tmp_path / "standing-memory.npz"
    document = json.loads(path.read_text())
    del document["parts"]["places"]
    path.write_text(json.dumps(document))
    with np.load(contents) as arrays:
        older = {name: arrays[name] for name in arrays if name != "new_scenes"}
    np.savez(contents, **older)
    again = Kept(tmp_path)
    assert again.recall.state() == before.recall.state() and again.recall.names == ("gate",)
    assert ask(again.recall, Camera(7), "hall", 40) in (NEW, NEW + 1)
    later = Kept(tmp_path, later_s=2 * HOUR_S)
    assert later.recall.names == () and ask(later.recall, Camera(7), "hall", 5) == 0


def test_places_of_another_source_say_nothing(tmp_path: Path) -> None:
    learned(Kept(tmp_path, origin="here"), "gate").save()
    assert Kept(tmp_path, origin="here").recall.names == ("gate",)
    there = Kept(tmp_path, origin="there")
    assert there.recall.names == () and ask(there.recall, Camera(7), "hall", 5) == 0


@pytest.mark.parametrize("part", [None, [], {"origin": "", "names": 3}, {"origin": "", "names": [3]}])
def test_names_that_are_none_are_not_read(tmp_path: Path, part: Any) -> None:
    learned(Kept(tmp_path), "gate").save()
    path = tmp_path / "standing.json"
    document = json.loads(path.read_text())
    document["parts"]["places"]["state"] = part
    path.write_text(json.dumps(document))
    assert Kept(tmp_path, later_s=2 * HOUR_S).recall.names == ()


def test_names_that_nothing_is_learned_from_are_not_kept() -> None:
    """Clients choose them: 20,000 names that were looked up once stayed in memory for ever."""
    scenes = Scenes(3, ["gate"])
    for place in range(50):
        assert scenes.show(str(place), scenes.of(str(place), None, None))
    assert scenes._showing_new == set()
    scenes.learned("7", None, scenes.lookups)
    assert scenes.names == ("gate",), "it is still new"
    assert not scenes.show("7", 0)
    assert scenes.names == ("gate", "7")
    for place in range(50):
        scenes.learned(str(place), None, scenes.lookups)
    assert len(scenes._showing_new) == 4 and scenes.names == ()


def test_where_there_are_more_names_than_places_a_new_one_is_nothing_special_after_a_restart() -> None:
    scenes = Scenes(3)
    scenes.settle()
    for place in "abcdefgh":
        assert (scenes.of(place, None, None) is None) == (place < "e")
        scenes.learned(place, 0, 0)
    assert scenes.names == ("e", "f", "g", "h")
    assert Scenes(3, scenes.names).of("i", None, None) == 0
    assert Scenes(64, scenes.names).of("i", None, None) is None, "there is room for more now"
