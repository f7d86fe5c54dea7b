"""What is lost with a damaged file, what is not, and who withdrew what."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gati.guard.standing import Standing, created_s
from gati.guard.standing_file import Saved, read_saved, read_shares
from tests.guard.test_standing import composition

NOW_S = 1e9
DAY_S = 86_400.0


def prove(standing: Standing, name: str) -> None:
    watch = standing.watch(name, 0.9, proven=False)
    while not watch.may_hit:
        watch.audited(agreed=True)


def change(path: Path, name: str, changed: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    document["versions"][name] = changed(document["versions"][name])
    path.write_text(json.dumps(document))


# Less delta -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [1, 3])
def test_a_proof_that_has_not_begun_takes_no_more_delta_than_is_asked_now(
    tmp_path: Path, settings: int
) -> None:
    """It kept what the run before asked for, and was complete after a third of the audits."""
    path = tmp_path / "standing.json"
    before = Standing(0.2, path)
    before.watch("a", 0.97, proven=False, settings=settings)
    before.watch("certified", 0.97, proven=True, settings=settings)
    before.save()
    surer = Standing(0.001, path)
    watch = surer.watch("a", 0.97, proven=False, settings=settings)
    assert watch.proof is not None and watch.proof.delta < 0.001
    certified = surer.watch("certified", 0.97, proven=True, settings=settings)
    assert certified.level == settings and surer.spending.used == 2, "it has no proof that would begin anew"


# Damage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [{"delta": "x"}, {"delta": 0}, {"heard_s": []}, [], None], ids=lambda each: json.dumps(each)
)
def test_one_damaged_version_costs_the_others_nothing_in_any_run(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "standing.json"
    first = Standing(0.05, path)
    for name in ("bad", "good"):
        prove(first, name)
    first.watch("certified", 0.9, proven=True)
    first.save()
    change(path, "bad", lambda kept: {**kept, **damage} if isinstance(damage, dict) else damage)
    for _ in range(3):
        again = Standing(0.05, path)
        assert again.distrusted and again.spending.used == 2
        assert again.watch("good", 0.9, proven=False).may_hit
        assert again.watch("certified", 0.9, proven=True).may_hit
        again.save()
    assert set(json.loads(path.read_text())["versions"]) == {"good", "certified"}
    assert not again.watch("bad", 0.9, proven=True).may_hit


def test_versions_are_forgotten_in_turn_also_after_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was missing of those behind the damaged one ended the stream."""
    monkeypatch.setattr("gati.guard.standing._MOST_VERSIONS", 1)
    path = tmp_path / "standing.json"
    first = Standing(0.05, path)
    for name in ("bad", "b"):
        first.watch(name, 0.9, proven=True)
    for name in "cd":
        first.watch(name, 0.9, proven=False)
    first.save()
    change(path, "bad", lambda kept: {**kept, "delta": "x"})
    again = Standing(0.05, path)
    again.watch("e", 0.9, proven=False)
    again.watch_only(())
    again.save()
    assert set(json.loads(path.read_text())["versions"]) == {"b", "e"}


def test_a_version_made_after_a_loss_is_believed_and_one_of_before_is_not(tmp_path: Path) -> None:
    """Every later version was on probation, for as long as the file lived."""
    path = tmp_path / "standing.json"
    path.write_text("{half")
    os.utime(path, (NOW_S, NOW_S))
    Standing(0.05, path, now=lambda: NOW_S).save()
    for _ in range(2):
        later = Standing(0.05, path, now=lambda: NOW_S + 10 * DAY_S)
        later.save()

    def may_hit(name: str, made_s: float | None) -> bool:
        return later.watch(name, 0.9, proven=True, created_s=made_s).may_hit

    assert may_hit("after", NOW_S + DAY_S)
    assert not may_hit("before", NOW_S - DAY_S)
    assert not may_hit("at that moment", NOW_S)
    assert not may_hit("just after it, by another clock", NOW_S + 50.0)
    assert not may_hit("unknown", None)
    assert not may_hit("of a clock that is wrong", NOW_S + 20 * DAY_S)


def test_a_loss_that_another_process_found_is_one_here_in_this_run_and_later(tmp_path: Path) -> None:
    lost, path = tmp_path / "lost.json", tmp_path / "standing.json"
    lost.write_text("{half")
    os.utime(lost, (NOW_S, NOW_S))
    here = Standing(0.05, path, now=lambda: NOW_S)
    here.take_in(read_saved(lost, NOW_S), lambda name, watch: None)
    here.save()
    for each in (here, Standing(0.05, path, now=lambda: NOW_S + DAY_S)):
        assert not each.watch("a", 0.9, proven=True, created_s=NOW_S - DAY_S).may_hit


def test_a_loss_of_unknown_time_was_before_the_file_was_written(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    path.write_text("{half")
    Standing(0.05, path).save()
    document = json.loads(path.read_text())
    del document["lost_s"]  # as an earlier Gati wrote it
    path.write_text(json.dumps(document))
    written_s = path.stat().st_mtime
    later = Standing(0.05, path, now=lambda: written_s + DAY_S)
    assert not later.watch("a", 0.9, proven=True, created_s=written_s - 1.0).may_hit
    assert later.watch("b", 0.9, proven=True, created_s=written_s + 100.0).may_hit


def test_a_loss_found_by_a_clock_set_back_was_not_before_the_file_was_written(
    tmp_path: Path,
) -> None:
    """A certificate of before let stopped caches answer, once the clock was right again."""
    path = tmp_path / "standing.json"
    path.write_text("{half")
    written_s = path.stat().st_mtime
    Standing(0.05, path, now=lambda: 0.0).save()
    later = Standing(0.05, path, now=lambda: written_s + DAY_S)
    assert not later.watch("a", 0.9, proven=True, created_s=written_s - 1.0).may_hit
    assert later.watch("b", 0.9, proven=True, created_s=written_s + 100.0).may_hit


def test_a_loss_is_not_forgotten_as_a_clock_that_was_set_back_finds_another(tmp_path: Path) -> None:
    """Certificates of between the two counted, once the clock was right again."""
    path, now_s = tmp_path / "standing.json", [NOW_S]
    path.write_text("{half")
    os.utime(path, (NOW_S, NOW_S))
    first = Standing(0.05, path, now=lambda: now_s[0])
    for name in ("no version", "contradicts itself"):
        first.watch(name, 0.9, proven=False)
    first.save()
    change(path, "no version", lambda kept: {**kept, "delta": "x"})
    change(path, "contradicts itself", lambda kept: {**kept, "state": "idle"})
    now_s[0] = NOW_S - 10 * DAY_S
    os.utime(path, (now_s[0], now_s[0]))
    again = Standing(0.05, path, now=lambda: now_s[0])
    again.watch("contradicts itself", 0.9, proven=False)
    again.take_in(Saved(lost="there, too", lost_s=now_s[0]), lambda name, watch: None)
    now_s[0] = NOW_S + DAY_S
    assert not again.watch("a", 0.9, proven=True, created_s=NOW_S - DAY_S).may_hit
    assert again.watch("b", 0.9, proven=True, created_s=NOW_S + 100.0).may_hit


def test_the_log_says_what_to_do_about_a_loss_in_the_future(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "standing.json"
    path.write_text("{half")
    for written_s, warned in ((NOW_S + 30.0, False), (NOW_S + 4000 * DAY_S, True)):
        os.utime(path, (written_s, written_s))
        Standing(0.05, path, now=lambda: NOW_S)
        assert ("from the future" in caplog.text) == warned
    assert "another 4000.0 days" in caplog.text and str(path) in caplog.text


@pytest.mark.parametrize("damage", ["cut short", "twice", "newer", "spread out", "cut in the number"])
def test_what_was_spent_counts_in_a_file_that_cannot_be_read(tmp_path: Path, damage: str) -> None:
    """Proofs took shares of delta again, from number 21 on."""
    path = tmp_path / "standing.json"
    standing = Standing(0.05, path)
    standing.spending.used = 70
    standing.watch("a", 0.9, proven=False)
    text = path.read_text()
    assert '"spent": 71,' in text
    path.write_text(
        {
            "cut short": text[: len(text) // 2],
            "twice": text.replace('"spent": 71', '"spent": 30') + text,
            "newer": text.replace('"format": 1', '"format": 99'),
            "spread out": json.dumps({"spent": 71}, indent=1, separators=(" ,", " : "))[:-1] + "}{",
            "cut in the number": text[: text.index("71,") + 1],
        }[damage]
    )
    spent = 71 if damage != "cut in the number" else 20
    shares = read_shares(path)
    assert shares is not None and shares.taken == spent and not shares.are_of(0.05)
    again = Standing(0.05, path)
    assert again.distrusted and again.spending.used == spent


def test_the_time_of_a_composition_is_read() -> None:
    then_s = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    assert created_s(composition()) == then_s
    assert created_s(composition(created="")) is None


# Who withdrew what ----------------------------------------------------------------------------------------


def withdrawn(path: Path, name: str = "a") -> Any:
    return json.loads(path.read_text())["versions"][name]["withdrawn_to"]


def test_only_what_a_guard_withdrew_is_said_to_be_its_doing(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    standing = Standing(0.05, path)
    watch = standing.watch("a", 0.9, proven=True, settings=3)
    assert withdrawn(path) is None
    watch.restrict(2)
    standing.save()
    assert withdrawn(path) is None
    while watch.level == 2:
        watch.audited(agreed=[True, False, False])
    assert withdrawn(path) == 1
    while watch.level < 3:
        watch.audited(agreed=[True, True, True])
    standing.save()
    assert withdrawn(path) == 1
    Standing(0.05, path).watch("a", 0.9, proven=True, settings=3)
    assert withdrawn(path) == 1
    Standing(0.05, path).watch("a", 0.95, proven=True, settings=3)
    assert withdrawn(path) == 1, "also for another promise"
    Standing(0.05, path).watch("a", 0.95, proven=True, settings=2)
    assert withdrawn(path) == 0, "its settings are not known to be the same"


def test_a_setting_in_alarm_stays_withdrawn_though_its_certificate_is_revoked_and_given_again(
    tmp_path: Path,
) -> None:
    """It answered again; and without a certificate, what was known of it could be forgotten."""
    path = tmp_path / "standing.json"
    standing = Standing(0.05, path)
    watch = standing.watch("a", 0.9, proven=True, settings=2)
    while not watch.in_alarm(1):
        watch.audited(agreed=[False, True])
    standing.save()
    for proven in (False, True):
        again = Standing(0.05, path).watch("a", 0.9, proven=proven, settings=2)
        kept = json.loads(path.read_text())["versions"]["a"]
        assert (again.state, again.may_hit, kept["certified"], kept["withdrawn_to"]) == (
            "stopped", False, True, 0,
        )  # fmt: skip


@pytest.mark.parametrize("settings", [1, 3])
def test_an_older_file_says_what_a_guard_may_have_withdrawn(tmp_path: Path, settings: int) -> None:
    path = tmp_path / "standing.json"
    first = Standing(0.05, path)
    for name in "ab":
        watch = first.watch(name, 0.9, proven=True, settings=settings)
    while watch.may_hit:
        watch.audited(agreed=[False] * settings)
    for name in "ab":
        change(path, name, lambda kept: {key: kept[key] for key in kept if key != "withdrawn_to"})
    again = Standing(0.05, path)
    for name in "ab":
        again.watch(name, 0.9, proven=True, settings=settings)
    assert (withdrawn(path, "a"), withdrawn(path, "b")) == (None, 0)
