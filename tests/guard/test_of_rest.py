"""Proofs on what memory leaves: which requests count for them, and of which setting of memory they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gati.guard.auditor import RECALL, Auditor, Given, Probed
from gati.guard.draws import Draws
from gati.guard.posts import Post
from gati.guard.proof import Spending
from gati.guard.standing import Standing, of_rest
from gati.guard.watch import Watch
from tests.guard.named import TRUE, NamedVersions, said
from tests.guard.test_after_memory import Memory

AGREEMENT, DELTA = 0.8, 0.1
RECALLED, WRONG_THERE = (
    0.5,
    0.6,
)  # share of what is left that memory alone answers; how wrong caches are there
SHARE = 0.2


class Looked(NamedTuple):
    """A request that memory leaves to caches, whoever answers it now."""

    taken: bool = False


def proven_on_what_is_left(seed: int) -> bool:
    """Caches that are right about all that memory alone leaves, and wrong about much that it answers."""
    random = np.random.default_rng(seed)
    spend, draws = Spending(DELTA).next, Draws(0.1, trials=1.0, seed=seed)
    auditor = Auditor[str](memory=Memory())
    post = Post(
        "library",
        Watch(AGREEMENT, spend=spend, proven=True),
        rest=lambda: Watch(AGREEMENT, spend=spend, proven=False),
        is_after_memory=lambda: True,
    )
    for _ in range(400):
        decided = auditor.decide(post, None, draws, room=lambda: True)
        recalled = bool(random.random() < RECALLED)
        lost = recalled and bool(random.random() < WRONG_THERE)
        given = Given(said(0, RECALL) if recalled else TRUE, Looked())
        needs = auditor.needs(decided, given)
        if needs is None:
            continue
        probed = [Probed(int(lost), "block", not lost)]
        auditor.settle(decided, given, TRUE, [(*each, probed) for each in needs.shadows])
        if post.may_hit:
            return True
    return False


@pytest.mark.slow
def test_what_memory_alone_answers_is_judged_in_the_proportion_in_which_it_is_left() -> None:
    """Its audits were ten times rarer: caches that are wrong in 30 % were proven for 80 % every time."""
    assert RECALLED * WRONG_THERE > 1.0 - AGREEMENT
    streams = 60
    broken = sum(proven_on_what_is_left(seed) for seed in range(streams)) / streams
    assert broken <= DELTA + 2.0 * math.sqrt(DELTA * (1.0 - DELTA) / streams)


# Which setting of memory leaves them -----------------------------------------------------------------------


class Run:
    """A run with certified caches, which are proven on what memory leaves as well."""

    def __init__(self, path: Path | None, settings: int = 1) -> None:
        self.standing = Standing(DELTA, path)
        several: Any = (None,) * settings if settings > 1 else ()

        def watch(name: str, *, proven: bool) -> Watch:
            return self.standing.watch(name, AGREEMENT, proven=proven, settings=settings)

        self.post: Post[str] = Post(
            "library",
            watch("library", proven=True),
            several,
            nested=True,
            rest=lambda: watch(of_rest("library"), proven=False),
            is_after_memory=lambda: self.roster.is_after_memory(self.post),
        )
        self.roster = NamedVersions(self.post)

    def prove(self, agreed: tuple[bool, ...] = (True,)) -> None:
        while not self.post.watch.may_hit:
            self.post.watch.audited(agreed=agreed)
        self.standing.save()


def test_caches_are_not_believed_on_a_harder_rest_although_it_is_not_watched_yet(tmp_path: Path) -> None:
    """After a restart, memory came to answer by looser settings before the caches were judged by its rest."""
    path = tmp_path / "standing.json"
    before = Run(path)
    before.roster.follow_memory(SHARE, 1)
    before.prove()
    again = Run(path)
    for share, level in ((None, 0), (0.08, 1), (0.09, 2), (0.5, 3)):
        again.roster.follow_memory(share, level)
    assert again.roster.after_memory and not again.post.may_hit
    assert not Run(path).standing.watch(of_rest("library"), AGREEMENT, proven=False).may_hit, "killed here"


def test_what_is_withdrawn_for_a_harder_rest_stays_so_though_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    run = Run(path)
    run.roster.follow_memory(SHARE, 1)
    run.prove()
    run.roster.follow_memory(SHARE, 2)  # and killed at once
    again = Run(path)
    again.roster.follow_memory(SHARE, 2)
    assert again.roster.after_memory and not again.post.may_hit
    again.prove()
    later = Run(path)
    later.roster.follow_memory(SHARE, 2)
    assert later.post.may_hit


def test_a_proof_that_counts_easier_requests_is_none_for_harder_ones() -> None:
    """Memory was withdrawn to its first setting, and came back to the third: what is left is harder again."""
    run = Run(None)
    run.roster.follow_memory(SHARE, 3)
    assert run.post.watch.proof is not None
    run.roster.follow_memory(SHARE, 1)
    run.prove()
    run.roster.follow_memory(SHARE, 3)
    assert not run.post.may_hit
    run.prove()
    run.roster.follow_memory(SHARE, 1)
    run.roster.follow_memory(SHARE, 3)
    assert run.post.may_hit, "it was proven on the harder ones, and no proof was under way meanwhile"


@pytest.mark.parametrize(("level", "counts"), [(3, False), (2, True), (1, True)])
def test_an_audit_of_an_easier_request_does_not_count_for_a_proof_on_harder_ones(
    level: int, counts: bool
) -> None:
    """Those of requests as hard, or harder, do: memory is followed with each request."""
    run = Run(None)
    run.roster.follow_memory(SHARE, 2)
    counting = run.post.counting()
    run.roster.follow_memory(SHARE, level)
    counting.audited([True])
    assert run.post.watch.proof is not None and run.post.watch.proof.audits == counts


@pytest.mark.parametrize("tried", [True, False])
def test_a_version_that_comes_to_serve_is_told_what_memory_leaves(tmp_path: Path, tried: bool) -> None:
    """It was proven when memory answered by its first setting, and brought back when by its third."""
    path = tmp_path / "standing.json"
    run = Run(path)
    run.roster.follow_memory(SHARE, 1)
    run.prove()
    run.roster.follow_memory(SHARE, 3)
    other = Watch(AGREEMENT, spend=lambda: 0.05, proven=False)
    while not other.may_hit:
        other.audited(agreed=True)
    other.left_by(1)
    back: Post[str] = Post(
        "back",
        Watch(AGREEMENT, spend=lambda: 0.05, proven=True),
        rest=lambda: other,
        is_after_memory=lambda: run.roster.is_after_memory(back),
    )
    if tried:
        run.roster.trial = back
        run.roster.settle()
        assert run.roster.trial is back, "it does not serve before it is told"
    run.roster.serve(back)
    assert not back.may_hit and back.of_all.may_hit


@pytest.mark.parametrize("proven", [True, False])
def test_a_file_without_the_setting_of_memory_is_believed_for_the_strictest(
    tmp_path: Path, proven: bool
) -> None:
    """As written by an earlier Gati: any setting may have left the requests, and those of it are easiest."""
    path = tmp_path / "standing.json"
    run = Run(path)
    run.roster.follow_memory(SHARE, 2)
    if proven:
        run.prove()
    else:
        run.post.watch.audited(agreed=True)
        run.standing.save()
    document = json.loads(path.read_text())
    kept = document["versions"][of_rest("library")]
    assert kept.pop("memory_level") == 2 and kept.pop("memory_levels") == [2]
    path.write_text(json.dumps(document))
    for level, believed in ((1, True), (3, False)):
        again = Run(path)
        again.roster.follow_memory(SHARE, level)
        proof = again.post.watch.proof
        assert (proof is None or proof.audits == 1) == believed and again.post.may_hit == (
            believed and proven
        )
        if level == 1:
            path.write_text(json.dumps(document))


def test_a_file_of_before_settings_had_levels_of_their_own_is_believed_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    run = Run(path)
    run.roster.follow_memory(SHARE, 2)
    run.prove()
    document = json.loads(path.read_text())
    del document["versions"][of_rest("library")]["memory_levels"]
    path.write_text(json.dumps(document))
    again = Run(path)
    again.roster.follow_memory(SHARE, 2)
    assert again.post.may_hit
    again.roster.follow_memory(SHARE, 3)
    assert not again.post.may_hit


@pytest.mark.parametrize("audits", [0, 5])
def test_what_was_proven_stays_when_memory_tightens_and_comes_back(tmp_path: Path, audits: int) -> None:
    """Only proofs that counted easier requests meanwhile begin anew: all settings were proven again."""
    path = tmp_path / "standing.json"
    run = Run(path, settings=3)
    run.roster.follow_memory(SHARE, 2)
    run.prove((True, False, False))
    watch, spent = run.post.watch, run.standing.spending.used
    run.roster.follow_memory(SHARE, 1)
    for _ in range(audits):
        watch.audited(agreed=[True, True, True])
    run.standing.save()
    again = Run(path, settings=3)
    again.roster.follow_memory(SHARE, 2)
    for each in (run, again):
        each.roster.follow_memory(SHARE, 2)
        assert each.post.watch.level == 1 and each.post.watch.may_hit
        proof = each.post.watch.proof
        assert proof is not None and (proof.audits == 0 or not audits)
        assert each.standing.spending.used == spent + (audits > 0)
        each.roster.follow_memory(SHARE, 3)
        assert each.post.watch.level == 0, "these requests are harder than any that it was proven on"


def test_a_setting_proven_on_easier_requests_alone_is_withdrawn() -> None:
    run = Run(None, settings=2)
    run.roster.follow_memory(SHARE, 2)
    run.prove((True, False))
    run.roster.follow_memory(SHARE, 1)
    watch = run.post.watch
    while watch.level == 1:
        watch.audited(agreed=[True, True])
    run.roster.follow_memory(SHARE, 2)
    assert (watch.level, watch.state) == (1, "serving")


@pytest.mark.parametrize(("level", "counts"), [(1, False), (2, True)])
def test_a_proof_taken_from_another_process_counts_next_to_what_left_its_requests(
    level: int, counts: bool
) -> None:
    """That of easier requests, which stricter memory left there, was believed next to looser memory here."""
    spend = Spending(DELTA).next
    there = Watch(AGREEMENT, spend=spend, proven=False)
    here = Watch.from_json(there.to_json(), spend=spend)
    here.prove_apart()
    here.left_by(2)
    there.left_by(level)
    for _ in range(3):
        there.audited(agreed=True)
    here.take_proofs(Watch.from_json(there.to_json(), spend=spend))
    assert here.proof is not None and here.proof.audits == 3
    assert here.left_by(2) != counts and here.proof is not None and here.proof.audits == 3 * counts


def test_proofs_that_are_taken_do_not_say_of_which_requests_what_is_proven_here() -> None:
    """The other process had proven the stricter setting again, on harder requests."""
    spend = Spending(DELTA).next
    there = Watch(AGREEMENT, spend=spend, proven=False, settings=2)

    def prove(memory_level: int) -> None:
        there.left_by(memory_level)
        while not there.level:
            there.audited(agreed=[True, False])

    prove(1)
    here = Watch.from_json(there.to_json(), spend=spend)
    here.prove_apart()
    prove(3)
    there.audited(agreed=[True, True])
    here.take_proofs(Watch.from_json(there.to_json(), spend=spend))
    assert here.level == 1 and here.proof is not None and here.proof.audits > 0
    assert here.left_by(3) and here.level == 0, "it was proven here on easier ones"


@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize("how", ["bring_back", "prove_anew"])
def test_a_version_that_comes_back_has_to_be_proven_again_on_the_rest_too(
    tmp_path: Path, how: str, opened: str
) -> None:
    """It was proven on what memory left of earlier requests, perhaps in an earlier run."""
    before = Run(tmp_path / "standing.json")
    before.roster.follow_memory(SHARE, 1)
    before.prove()
    again = Run(tmp_path / "standing.json")
    if opened == "before":
        assert again.post.of_rest.may_hit
    getattr(again.post, how)()
    assert again.post.of_all.may_hit, "its certificate stays"
    assert not again.post.of_rest.may_hit
