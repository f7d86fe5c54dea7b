"""All proofs of a model err together with at most its delta, however often the number of replicas changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.inference import keeping as module
from services.inference.keeping import ServedStanding, open_standing
from services.inference.settings import InferenceSettings
from services.locks import hold

DELTA = 0.05
FORGOTTEN = 20  # shares that a process may take while it drains

Replicas = list[ServedStanding]


@contextmanager
def running(folder: Path, replicas: int) -> Iterator[Replicas]:
    """The processes of a model with so many replicas."""
    with ExitStack() as stack:
        started = []
        for replica in range(replicas):
            told = {"name": "m", "state": folder, "replica": replica, "replicas": replicas}
            standing = open_standing(InferenceSettings.model_validate(told))
            stack.callback(standing.close)
            started.append(standing)
        yield started


def written(replicas: Replicas) -> None:
    """As after each share that was taken, and as each process looks for files that it waits for."""

    async def settle() -> None:
        for each in replicas:
            each.save()
            await each.recorded()
            await each.look()

    asyncio.run(settle())


def taken(replicas: Replicas, by: Sequence[int]) -> float:
    """The delta of proofs that begin in these replicas, one after the other."""
    found = sum(replicas[each % len(replicas)].spending.next() for each in by)
    written(replicas)
    return found


def without_numbers(folder: Path) -> None:
    """The files as an older Gati wrote them."""
    for path in folder.glob("*.json"):
        document = json.loads(path.read_text())
        del document["since"]
        path.write_text(json.dumps(document))


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 4), (4, 3)])
def test_another_number_of_replicas_takes_what_is_left(
    tmp_path: Path, before: int, after: int, older: bool
) -> None:
    """From 1 to 2 they took up to one and a half times the delta: the new replica had a whole part."""
    with running(tmp_path, before) as replicas:
        spent = taken(replicas, range(10 * before))
    if older:
        without_numbers(tmp_path)
    with running(tmp_path, after) as replicas:
        parts = [each.spending.next() for each in replicas]
        spent += sum(parts) + taken(replicas, range(1000 * after))
    assert parts == [pytest.approx(DELTA / after / (11 * 12))] * after
    assert 0.99 * DELTA < spent < DELTA


@pytest.mark.parametrize("older", [False, True])
def test_the_same_number_of_replicas_goes_on_where_it_was(tmp_path: Path, older: bool) -> None:
    with running(tmp_path, 3) as replicas:
        taken(replicas, [0, 0, 1, 2])
    if older:  # then it is not known that the number was the same
        without_numbers(tmp_path)
    with running(tmp_path, 3) as replicas:
        assert [each.spending.used for each in replicas] == ([2, 2, 2] if older else [2, 1, 1])


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("spent", [0, 2])
def test_replicas_that_only_begin_are_not_taken_for_some_that_drain(
    tmp_path: Path, spent: int, older: bool
) -> None:
    """Each of them cost all others twenty shares, at every change of their number."""
    with running(tmp_path, 2) as replicas:
        taken(replicas, [0] * spent)
    if older:
        without_numbers(tmp_path)
    with running(tmp_path, 4) as replicas:
        assert [each.spending.used for each in replicas] == [spent] * 4
    assert len([*tmp_path.glob("*.lock")]) == 4


def test_a_replica_may_take_a_moment_to_say_that_it_does_not_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, 1):
        pass
    begins = hold(tmp_path / "m.lock")
    assert not isinstance(begins, str)

    def rewrite(_: float) -> None:
        document = json.loads((tmp_path / "m.json").read_text())
        (tmp_path / "m.json").write_text(json.dumps({**document, "delta": DELTA / 2}))

    monkeypatch.setattr(module.time, "sleep", rewrite)
    second = {"name": "m", "state": tmp_path, "replica": 1, "replicas": 2}
    standing = open_standing(InferenceSettings.model_validate(second))
    assert standing.spending.used == 0
    standing.close()
    begins.close()


def test_a_lock_that_is_only_asked_about_is_not_taken_for_that_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = hold(tmp_path / "m.lock")
    assert not isinstance(asks, str)
    monkeypatch.setattr(module.time, "sleep", lambda _: asks.close())
    with running(tmp_path, 1) as (standing,):
        assert standing.is_owned and standing.spending.used == 0


def test_a_replica_that_is_gone_has_taken_its_shares(tmp_path: Path) -> None:
    with running(tmp_path, 2) as replicas:
        spent = taken(replicas, [0] * 2 + [1] * 500)
    for count in (1, 2, 1):
        with running(tmp_path, count) as replicas:
            spent += taken(replicas, range(500 * count))
    assert spent < DELTA


eras = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=FORGOTTEN // 2), st.booleans()),
    min_size=2,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(eras=eras, older=st.booleans())
def test_no_sequence_of_changes_spends_more_than_delta(
    eras: list[tuple[int, list[int], bool]], older: bool
) -> None:
    """Some begin while processes of before still drain, and also take shares."""
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, ExitStack() as last:
        patch.setattr("os.fsync", lambda _: None)  # nothing is to survive this test
        patch.setattr(module, "_BEGINS_S", 0.0)  # one begins after another
        folder, draining = Path(name), Replicas()
        spent = 0.0
        for count, by, overlaps in eras:
            if not overlaps:
                last.close()
                draining = []
                if older:
                    without_numbers(folder)
                    older = False
            this = ExitStack()
            replicas = this.enter_context(running(folder, count))
            spent += taken(replicas, by)
            if draining:
                spent += taken(draining, by)
            last.close()
            written(replicas)  # they take files over
            spent += taken(replicas, by)
            draining = replicas
            last.push(this.pop_all())
        last.close()
    assert spent <= DELTA
