"""When the adaptation service renews caches, by the samples of each version."""

from __future__ import annotations

import numpy as np

from gati.samples.record import Record
from services.adaptation.reasons import Latest, Rules

RULES = Rules(accuracy=0.97, interval_s=600.0, falls_to=0.5, least=300, kept=1400)
START_S = 1000.0


def records(
    version: str, count: int, *, hits: float = 0.0, losses: float = 0.0, from_s: float = START_S
) -> list[Record]:
    found = []
    for k in range(count):
        hit = k < hits * count
        found.append(
            Record(np.zeros(2, np.float32), "input", 1, from_s + k / 100, "m", source=version,
                   exit="early" if hit else None, agreed=k >= losses * count if hit else None)
        )  # fmt: skip
    return found


def test_a_published_version_is_not_judged_by_what_another_answered() -> None:
    """The old one goes on hitting too little while the new one is proven: that is known already."""
    latest = Latest("3", promised=0.8, since_s=START_S)
    poor = records("default", 500, hits=0.9, losses=0.3)
    for after_s in (100.0, 700.0, 1700.0):
        assert RULES.due(poor, latest, START_S, START_S + after_s).reason is None
        assert not latest.seen
    assert RULES.due(poor, latest, START_S, START_S + 1900.0).reason == "alarm"  # it was never proven


def test_once_it_answers_its_own_samples_count_and_no_others() -> None:
    latest = Latest("3", promised=0.8, since_s=START_S)
    poor = records("default", 500, hits=0.9, losses=0.3)
    good = records("3", 300, hits=0.7, from_s=START_S + 20.0)
    due = RULES.due(poor + good, latest, START_S, START_S + 100.0)
    assert latest.seen and due.reason is None and due.hit_rate == 0.7
    few = records("3", 300, hits=0.2, from_s=START_S + 20.0)
    assert RULES.due(poor + few, latest, START_S, START_S + 100.0).reason == "hit rate"
    wrong = records("3", 300, hits=0.9, losses=0.2, from_s=START_S + 20.0)
    assert RULES.due(poor + wrong, latest, START_S, START_S + 100.0).reason == "alarm"


def test_what_was_answered_before_it_was_published_is_not_its_own() -> None:
    latest = Latest("3", promised=0.8, since_s=START_S)
    earlier = records("3", 300, hits=0.1, from_s=START_S - 100.0)  # active before, then rolled back
    due = RULES.due(earlier, latest, START_S, START_S + 100.0)
    assert (due.reason, due.hit_rate, latest.seen) == (None, 0.8, False)


def test_it_says_when_it_skips_and_how_much_it_needs() -> None:
    latest = Latest("default", promised=0.8, since_s=START_S, seen=True)
    few = records("default", 120, hits=0.9)
    due = RULES.due(few, latest, START_S, START_S + 601.0)
    assert (due.reason, due.skipped) == (None, "120 samples, 300 are needed")
    assert RULES.due(few, latest, START_S, START_S + 500.0).skipped == ""
    small = Rules(accuracy=0.99, interval_s=600.0, falls_to=0.5, least=1196, kept=700)
    said = small.due(few, latest, START_S, START_S + 601.0).skipped
    assert said.endswith("1196 are needed, but only 700 are kept: set window_inputs to 1196 or more")


def test_an_alarm_that_was_looked_into_waits_for_further_samples() -> None:
    """Where requests stopped after an alarm, the same samples were trained on every minute."""
    latest = Latest("default", promised=0.8, since_s=START_S, seen=True)
    wrong = records("default", 400, hits=0.9, losses=0.2)
    assert RULES.due(wrong, latest, START_S, START_S + 100.0).reason == "alarm"
    began_s, tried_s, now_s = START_S + 200.0, START_S + 220.0, START_S + 300.0
    assert RULES.due(wrong, latest, tried_s, now_s, began_s).reason is None
    for more, reason in ((74, None), (75, "alarm")):
        later = records("default", more, hits=0.9, losses=0.2, from_s=began_s)
        assert RULES.due(wrong + later, latest, tried_s, now_s, began_s).reason == reason
    assert RULES.due(wrong, latest, tried_s, now_s).reason == "alarm", "no attempt has had these samples"
    few = records("default", 40, hits=0.9, losses=0.5, from_s=began_s)  # all that an hour keeps
    assert RULES.due(few, latest, tried_s, now_s, began_s).reason == "alarm", "others are too old by now"


def test_with_enough_samples_it_renews_every_interval() -> None:
    latest = Latest("default", promised=0.8, since_s=START_S, seen=True)
    enough = records("default", 400, hits=0.9)
    assert RULES.due(enough, latest, START_S, START_S + 601.0).reason == "interval"
    assert RULES.due(enough, latest, START_S + 100.0, START_S + 601.0).reason is None
