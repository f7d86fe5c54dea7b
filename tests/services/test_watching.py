"""The watches of a version: what lets it answer, and with what probability its proofs may err."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gati.composition.walk import certify
from gati.guard.posts import Post
from gati.model.preprocess import Preprocessing
from services.inference.counts import Counts
from services.inference.following import Answering, Shared
from services.inference.keeping import ServedStanding
from services.inference.line import Line
from services.inference.opening import Opened
from services.inference.service_times import ServiceTimes
from services.inference.settings import InferenceSettings
from services.inference.versions import Versions
from services.inference.watching import Watching
from tests.engine.served import composed, exit_at

CERTIFIED = replace(composed("0" * 64, (exit_at(0, 0.5),)), certificate=certify([(0, 1500)], 0.97, 0.05))
FIRST_SHARE = 0.5  # of delta, that the first proof takes


def settings_of(replicas: int) -> InferenceSettings:
    return InferenceSettings.model_validate({"name": "small", "memory": True, "replicas": replicas})


def post_of(*, retrained: bool = False, replicas: int = 1) -> Post[Answering]:
    """A version next to memory, which has been loaded with a certificate."""
    counts = Counts()
    shared = Shared(settings_of(replicas), counts, Line(counts), ServedStanding(None), None)
    engine: Any = None
    opened = Opened(engine, engine, CERTIFIED, ServiceTimes(), retrained)
    watching = Watching(shared, lambda *_: None, lambda _: False)
    post = watching.post(Answering("small", engine, engine, CERTIFIED), opened)
    assert post is not None
    return post


def test_a_certificate_says_nothing_of_the_requests_that_memory_leaves() -> None:
    post = post_of()
    assert post.of_all.may_hit and post.of_all.certified == 1
    assert not post.of_rest.may_hit and post.of_rest.certified == 0


def test_a_version_of_a_repository_is_proven_by_audits_whatever_its_composition_says() -> None:
    """Its caches were trained on: a certificate in its files is that of others."""
    post = post_of(retrained=True)
    assert not post.of_all.may_hit and post.of_all.state == "probation"


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_proofs_of_all_replicas_err_together_as_one_of_a_single_one_would(replicas: int) -> None:
    """Each replica proves by audits of its own, and any of them may let false caches answer."""
    for watch in (post_of(replicas=replicas).of_rest, post_of(retrained=True, replicas=replicas).of_all):
        assert watch.proof is not None
        assert watch.proof.delta == pytest.approx(FIRST_SHARE * 0.05 / replicas)


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_proofs_of_memory_err_together_over_all_replicas_too(replicas: int) -> None:
    with ThreadPoolExecutor(1) as thread:
        versions: Any = SimpleNamespace(
            _settings=settings_of(replicas),
            _standing=ServedStanding(None),
            _prober=thread,
            model=SimpleNamespace(
                checkpoint_sha256="0" * 64, preprocessing=Preprocessing(), class_names=None
            ),
        )
        memory = Versions._new_memory(versions, CERTIFIED, post_of().of_all, alone=True)
        proof = memory.recall.proof
    assert proof is not None and proof.agreement == 0.97
    assert proof.delta == pytest.approx(FIRST_SHARE * 0.05 / replicas)
