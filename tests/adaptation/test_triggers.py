"""When caches of a stream are retrained, and what an attempt leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gati.adaptation.attempts import Attempts
from gati.adaptation.samples import Sample, Samples
from gati.adaptation.settings import AdaptSettings
from gati.adaptation.triggers import SETTLED, Triggers
from gati.errors import AdaptError

LEAST = 400  # samples to train on
INTERVAL_S = 100.0
SETTINGS = AdaptSettings(interval_s=INTERVAL_S, falls_to=0.5)


def sampled(count: int, *, limit: int = 700, first: int = 1) -> Samples:
    """One sample of each of so many requests."""
    samples = Samples(limit, 1e9)
    for request in range(first, first + count):
        samples.add(Sample(torch.zeros(1), 0, torch.ones(2), 0.0, request))
    return samples


def triggers(*, promised: float = 0.8) -> Triggers:
    made = Triggers(SETTINGS, LEAST)
    made.replaced(promised)
    return made


def reason(made: Triggers, samples: Samples, time_s: float = 0.0, **signs: bool) -> str | None:
    return made.due(samples, time_s=time_s, **{"known_scenes": False, "alarmed": False, **signs}).reason


# The reason ------------------------------------------------------------------------------------------------


def test_an_alarm_waits_only_until_there_is_enough_to_train_on() -> None:
    for count, known, wanted in ((LEAST - 1, False, None), (LEAST, False, "alarm"), (0, True, "alarm")):
        assert reason(triggers(), sampled(count), alarmed=True, known_scenes=known) == wanted


def test_the_interval_begins_with_the_first_request_and_again_with_each_attempt() -> None:
    made, samples = triggers(), sampled(LEAST)
    made.answered(1, hit=True, time_s=1000.0)
    assert reason(made, samples, 1000.0 + INTERVAL_S - 1.0) is None
    assert reason(made, samples, 1000.0 + INTERVAL_S) == "interval"
    made.attempted(taken=0, time_s=1100.0, tried=True)
    assert reason(made, samples, 1100.0 + INTERVAL_S - 1.0) is None
    assert reason(made, samples, 1100.0 + INTERVAL_S) == "interval"


def test_an_interval_with_too_few_samples_is_told_once_and_begins_anew() -> None:
    made, few = triggers(), sampled(LEAST - 1)
    made.answered(1, hit=True, time_s=0.0)
    told = [made.due(few, time_s=at, known_scenes=False, alarmed=False) for at in (50.0, 100.0, 150.0, 200.0)]
    assert [bool(each.skipped) for each in told] == [False, True, False, True]
    assert told[1] == (None, "399 samples, 400 are needed")


def fed(made: Triggers, request: int, count: int, *, hits: bool) -> int:
    for each in range(request, request + count):
        made.answered(each, hit=hits, time_s=0.0)
    return request + count


def test_a_drop_of_the_hit_rate_is_dated_to_about_when_it_began() -> None:
    made = triggers()
    dropped = fed(made, 1, 1000, hits=True)
    now = dropped
    while made.changed_at is None and now < dropped + 100:
        now = fed(made, now, 1, hits=False)
    assert made.changed_at is not None and dropped - 10 <= made.changed_at <= dropped + 30
    assert reason(made, sampled(LEAST, first=made.changed_at - LEAST + 1)) is None, "all of before"
    assert reason(made, sampled(LEAST, first=made.changed_at)) is None
    assert reason(made, sampled(LEAST, first=made.changed_at + 1)) == "hit rate"
    assert reason(made, sampled(0), known_scenes=True) == "hit rate"
    fed(made, now, 300, hits=True)
    assert made.changed_at is None, "they hit again"


def test_a_hit_rate_is_not_judged_by_few_requests_nor_by_those_of_other_caches() -> None:
    made = triggers()
    fed(made, 1, 1, hits=True)
    assert made.hit_rate == pytest.approx(1.0), "of one request, that is all"
    made.replaced(0.8)
    fed(made, 1, SETTLED - 1, hits=False)
    assert made.changed_at is None and made.hit_rate == 0.0
    fed(made, SETTLED, 1, hits=False)
    assert made.changed_at is not None
    made.replaced(0.8)
    assert made.changed_at is None and made.hit_rate is None
    fed(made, SETTLED, SETTLED - 1, hits=False)
    assert made.changed_at is None


@pytest.mark.parametrize(("share", "drops"), [(0.7, False), (0.3, True)])
def test_half_of_the_promised_hits_are_enough(share: float, drops: bool) -> None:
    made = triggers()
    for request in range(1, 1001):
        made.answered(request, hit=int(share * request) > int(share * (request - 1)), time_s=0.0)
    assert made.hit_rate == pytest.approx(share, abs=0.02) and (made.changed_at is not None) == drops


def test_an_attempt_waits_for_further_samples_and_for_twice_as_many_after_each_failure() -> None:
    """docs/video.md: each failure in a row doubles them, up to eight times as many."""
    made, waits = triggers(), list[int]()
    nothing = sampled(0)
    for failed in (False, True, True, True, True, False):
        made.attempted(taken=1000, time_s=0.0, tried=True, failed=failed)
        waits.append(made.more(nothing) - 1000)
    assert waits == [100, 200, 400, 800, 800, 100]
    made.attempted(taken=1000, time_s=0.0, tried=False)
    assert made.more(nothing) == 1020
    assert made.more(sampled(1020)) == 0 and made.more(sampled(1019)) == 1
    assert reason(made, sampled(1019), alarmed=True) is None
    assert reason(made, sampled(1020), alarmed=True) == "alarm"


# The attempt -----------------------------------------------------------------------------------------------


class Renewing:
    """A renewal whose outcome the test chooses."""

    def __init__(self) -> None:
        self.outcome: Any = SimpleNamespace(kind="activated")
        self.meanwhile: Callable[[], object] = lambda: None
        self.asked: list[tuple[Any, ...]] = []

    def enough(self, samples: Samples, changed_at: int | None) -> bool:
        return len(samples) >= LEAST

    def __call__(
        self, current: Any, samples: Samples, why: str, changed_at: int | None, *, unproven: Any
    ) -> Any:
        self.asked.append((current, why, changed_at, unproven))
        self.meanwhile()
        return self.outcome


class Stream:
    """A stream in alarm with enough samples: something is to be tried at once."""

    def __init__(
        self, *, delay_s: float | None = None, enabled: bool = True, samples: int = LEAST, scenes: int = 0
    ) -> None:
        self.samples, self.triggers, self.renewal = sampled(samples), triggers(), Renewing()
        self.told: list[tuple[str, str]] = []
        self.taken: list[Any] = []
        self.scenes = list(range(scenes))  # of earlier versions
        self.succession: Any = SimpleNamespace(
            trial=None,
            alarmed=True,
            unproven={7},
            serving=SimpleNamespace(deployed="serving"),
            take=self.taken.append,
        )
        deployments: Any = SimpleNamespace(scenes=lambda: self.scenes)
        renewal: Any = self.renewal
        self.attempts = Attempts(
            *(renewal, deployments, self.succession, self.samples, self.triggers),
            *(AdaptSettings(interval_s=INTERVAL_S, enabled=enabled), threading.RLock()),
            delay_s=delay_s,
            tell=lambda kind, message, _: self.told.append((kind, message)),
        )

    def attempt(self, time_s: float = 0.0) -> None:
        job = self.attempts.next(time_s)
        assert job is not None
        job()

    def more(self, count: int) -> None:
        for request in range(count):
            self.samples.add(Sample(torch.zeros(1), 0, torch.ones(2), 0.0, 10_000 + request))


def test_what_is_found_goes_on_trial_and_nothing_else_is_tried_meanwhile() -> None:
    stream = Stream()
    job = stream.attempts.next(0.0)
    assert job is not None and stream.attempts.under_way and stream.attempts.next(0.0) is None
    stream.scenes = [1]
    job()
    assert stream.taken == [stream.renewal.outcome] and stream.attempts.fitted
    assert stream.renewal.asked == [("serving", "alarm", None, frozenset({7}))]
    assert stream.told == [("retraining", "alarm")] and not stream.attempts.under_way
    assert stream.attempts.next(0.0) is None, "it has had these samples"
    stream.more(LEAST // 4)
    stream.succession.trial = "version 1"
    assert stream.attempts.next(0.0) is None
    stream.succession.trial = None
    assert stream.attempts.next(0.0) is not None


def test_where_the_old_caches_are_kept_none_is_fitted() -> None:
    stream = Stream()
    stream.renewal.outcome = SimpleNamespace(kind="kept")
    stream.attempt()
    assert stream.taken and not stream.attempts.fitted


def test_a_version_that_knows_the_scene_may_be_tried_with_few_samples() -> None:
    """Without one, these are too few, and it is no retraining."""
    assert Stream(samples=10).attempts.next(0.0) is None
    stream = Stream(samples=10, scenes=1)
    stream.renewal.outcome = None
    stream.attempt()
    assert stream.renewal.asked and not stream.told and not stream.taken and not stream.attempts.fitted
    assert stream.triggers.more(stream.samples) == LEAST // 20, "soon again, but not with each request"


def test_a_version_that_was_just_found_may_know_the_scene_later() -> None:
    stream = Stream()
    stream.scenes = [1]  # from now on
    stream.attempt()
    stream.samples._kept.clear()
    stream.more(LEAST // 4)
    assert stream.attempts.next(0.0) is not None


def test_after_a_drop_of_the_hit_rate_what_came_before_is_not_trained_on() -> None:
    stream = Stream()
    stream.succession.alarmed = False
    fed(stream.triggers, 1, SETTLED, hits=False)
    stream.more(LEAST)
    stream.attempt()
    assert stream.renewal.asked == [("serving", "hit rate", stream.triggers.changed_at, frozenset({7}))]


def test_where_nothing_is_learned_nothing_is_tried() -> None:
    assert Stream(enabled=False).attempts.next(0.0) is None


def test_in_simulated_time_the_trial_begins_later_and_another_attempt_after_that() -> None:
    stream = Stream(delay_s=5.0)
    stream.attempt(10.0)
    stream.more(LEAST)
    stream.attempts.take_due(14.9)
    assert not stream.taken and stream.attempts.next(14.9) is None
    stream.attempts.take_due(15.0)
    stream.attempts.take_due(16.0)
    assert stream.taken == [stream.renewal.outcome] and stream.attempts.next(16.0) is not None


@pytest.mark.parametrize("error", [AdaptError("the disk is full"), MemoryError()])
def test_after_a_failure_the_next_attempt_waits_for_samples_that_come_after_it(error: Exception) -> None:
    """Of a long one, those that came meanwhile were enough: it failed again and again, all the time."""

    def fails() -> None:
        stream.more(LEAST)
        raise error

    stream = Stream()
    stream.renewal.meanwhile = fails
    job = stream.attempts.next(0.0)
    assert job is not None
    if isinstance(error, AdaptError):
        job()
        wanted = f"retraining failed: the disk is full; next after {LEAST // 2} more samples"
        assert stream.told[1:] == [("failed", wanted)]
    else:
        with pytest.raises(MemoryError):  # told by the background
            job()
        assert len(stream.told) == 1
    assert not stream.attempts.under_way and not stream.taken
    assert stream.triggers.more(stream.samples) == LEAST // 2
    assert stream.attempts.next(0.0) is None


def test_after_a_success_those_that_came_meanwhile_count_for_the_next() -> None:
    stream = Stream()
    stream.renewal.meanwhile = lambda: stream.more(LEAST // 4)
    stream.attempt()
    assert stream.attempts.next(0.0) is not None
