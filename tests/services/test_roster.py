"""Which versions keep their proofs over a restart, and until when."""

from __future__ import annotations

import asyncio
import json
import re
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gati.guard.posts import Post
from services.inference.following import Answering
from services.inference.keeping import ServedStanding
from services.inference.roster import LastRun
from tests.services.test_standing import Run


def fail(run: Run, post: Post[Answering]) -> None:
    """Disagreements until the trial is given up."""
    while run.roster.trial is post:
        post.watch.audited(agreed=False)
        run.roster.give_up()


def last_run(path: Path) -> None:
    """Version 5 serves, 6 is on trial."""
    run = Run(path)
    run.proven("5")
    assert not run.activate(run.post("6"))
    run.standings.close()


def test_a_version_that_returns_after_others_answered_proves_itself_again(tmp_path: Path) -> None:
    """The one on trial went on after a restart, failed, and the one that had served was believed at once."""
    last_run(tmp_path / "small.json")
    run = Run(tmp_path / "small.json")
    six = run.post("6")
    assert not run.activate(six) and run.roster.serving.version.name == "default"
    fail(run, six)
    five = run.post("5")
    assert not run.activate(five) and five.watch.state == "probation" and run.roster.trial is five
    run.standings.close()


@pytest.mark.parametrize("order", ["56", "65"])
def test_before_any_request_both_go_on_in_any_order(tmp_path: Path, order: str) -> None:
    """The repository's version is there first, then those that were loaded over REST."""
    last_run(tmp_path / "small.json")
    run = Run(tmp_path / "small.json")
    for name in order:
        assert run.activate(run.post(name)) == (name == "5")
    assert [each.version.name for each in run.roster.in_use[:2]] == ["5", "6"]
    run.roster.give_up()
    run.standings.close()
    assert Run(tmp_path / "small.json").last.goes_on(run.roster.serving)


def test_what_served_last_is_named_until_it_serves_or_another_one_has_answered(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    assert LastRun(ServedStanding(None)).served is None
    last_run(path)
    run = Run(path)
    assert not run.activate(run.post("6")) and run.last.served == "5"
    assert run.activate(run.post("5")) and run.last.served is None
    run.standings.close()
    run = Run(path)
    assert run.last.served == "5"
    run.roster.give_up()  # after a request
    assert run.last.served is None
    run.standings.close()
    run = Run(path)
    assert run.last.served is None, "the library's own caches served"
    run.standings.close()


@pytest.mark.parametrize("damage", [["5"], 5])
@pytest.mark.parametrize("part", ["serving", "trial", "version"])
def test_a_damaged_part_of_the_last_run_names_no_version(tmp_path: Path, part: str, damage: Any) -> None:
    path = tmp_path / "small.json"
    last_run(path)
    document = json.loads(path.read_text())
    document["parts"]["answering"]["state"][part] = damage
    path.write_text(json.dumps(document))
    run = Run(path)
    assert run.last.served == ("5" if part == "trial" else None)
    assert run.last.goes_on(run.post("5")) == (part != "serving")
    assert run.last.goes_on(run.post("6")) == (part != "trial")
    run.standings.close()


def test_a_run_in_which_others_answered_is_the_last_one_for_the_next(tmp_path: Path) -> None:
    """Its version could not be loaded at first, and was believed after a further restart."""
    last_run(tmp_path / "small.json")
    run = Run(tmp_path / "small.json")
    run.roster.give_up()  # after a request
    run.standings.close()
    again = Run(tmp_path / "small.json")
    five = again.post("5")
    assert not again.activate(five) and not five.may_hit
    again.standings.close()


def test_what_serves_again_keeps_its_proof_whatever_is_answered(tmp_path: Path) -> None:
    last_run(tmp_path / "small.json")
    run = Run(tmp_path / "small.json")
    five, six = run.post("5"), run.post("6")
    assert run.activate(five)
    for _ in range(10):
        run.roster.give_up()
    assert five.may_hit and not run.activate(six) and run.roster.trial is six
    run.standings.close()


@pytest.mark.parametrize("earlier", [False, True])
def test_the_promise_tells_which_version_served_last(tmp_path: Path, earlier: bool) -> None:
    """Of the same caches, one with another promise kept its proof, too. Earlier files do not tell it."""
    path = tmp_path / "small.json"
    run = Run(path)
    run.proven("5")
    run.standings.close()
    if earlier:
        path.write_text(re.sub(r'("serving": ?"\w+) at [\d.]+"', r'\1"', path.read_text()))
    run = Run(path)
    five = run.post("5")
    other = copy(five)
    assert five.version.composition is not None
    strict = replace(five.version.composition, accuracy_target=0.99)
    other.version = Answering("6", five.version.engine, five.version.queue, strict)
    assert run.last.goes_on(five) and run.last.goes_on(other) == earlier
    run.standings.close()


def test_where_another_replica_stops_a_version_certified_caches_answer_instead(tmp_path: Path) -> None:
    """They did in that replica only; in the others the base model answered until caches were proven again."""
    run, there = Run(tmp_path / "small.json", tmp_path / "other.json"), Run(tmp_path / "other.json")
    run.roster.first.nested = True
    later, stopping = run.proven("later"), there.proven("later").watch
    while stopping.may_hit:
        stopping.audited(agreed=False)
    asyncio.run(there.standings.recorded())
    asyncio.run(run.standings.look())
    assert not later.may_hit and run.roster.may_hit
    assert run.roster.serving.version.name == "default" and run.roster.alarmed
    for each in (run, there):
        each.standings.close()
