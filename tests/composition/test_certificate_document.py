"""The certificate in a composition file: what is written is read, older files are, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gati.composition.accuracy import AccuracyDrop
from gati.composition.certificate import (
    AttemptCount,
    Certificate,
    EngineWalk,
    FurtherCount,
    NewInputs,
    Recount,
    WalkedOn,
)
from gati.composition.walk import certify, certify_every_class
from gati.documents import DocumentKind
from gati.errors import CompositionError

KIND = DocumentKind(1, CompositionError, "compose again")
WALK = certify([(0, 500), (2, 500)], 0.97, 0.05)

COMPLETE = replace(
    certify([(0, 400), (1, 400)], 0.97, 0.05, share=0.3),
    walked_on=WalkedOn(
        backend="openvino-int8",
        split_seed=7,
        path_sha256="ab" * 32,
        mean_latency_ms=0.5,
        gain=2.0,
        hit_rate=0.9,
    ),
    accuracy_drop=AccuracyDrop(n=400, became_wrong=1, became_right=2, upper_bound=0.01, confidence=0.95),
    engines=(
        EngineWalk(
            backend="openvino-bf16",
            share_of_delta=0.9,
            hoped_ms=0.4,
            certified=False,
            reason="it loses too many answers",
        ),
        EngineWalk(
            backend="torch",
            share_of_delta=0.1,
            hoped_ms=0.6,
            certified=True,
            path_sha256="cd" * 32,
            tested=WALK.tested,
        ),
    ),
    use=2,
    attempt=AttemptCount(3, 2),
    further=FurtherCount("more.npz 12ab", 100, "left 3 inputs out"),
    new_inputs=NewInputs(1, 390),
)
RENEWED = replace(
    certify([(3, 300)], 0.97, 0.05, share=0.75),
    attempt=AttemptCount(1, 1),
    recount=Recount(
        data="new.npz 34cd",
        hit_rate=0.8,
        comparison="more than chance explains",
        note="a note",
        created="2026-01-01T00:00:00Z",
    ),
    previous=COMPLETE,
)


def read(values: Any) -> Certificate:
    return Certificate.from_json(values, KIND, "x.json: certificate")


@pytest.mark.parametrize(
    "certificate",
    [
        pytest.param(WALK, id="counts alone"),
        pytest.param(COMPLETE, id="composed"),
        pytest.param(RENEWED, id="renewed"),
        pytest.param(certify_every_class([[(0, 400), (3, 400)]], 0.97, 0.05, ["cat", "dog"]), id="by class"),
        pytest.param(certify_every_class([[(0, 400), (0, 0)]], 0.97, 0.05), id="classes without names"),
        pytest.param(certify([], 0.97, 0.05), id="nothing counted"),
    ],
)
def test_what_is_written_is_read(certificate: Certificate) -> None:
    written = json.loads(json.dumps(certificate.to_json(), allow_nan=False))
    assert read(written) == certificate
    assert read(written).to_json() == written


def test_the_sentence_tells_of_the_use_and_the_attempt() -> None:
    sentence = COMPLETE.sentence()
    assert sentence.startswith("With 95 % confidence at least 97 % of answers are the base model's: ")
    attempts = (
        "3rd attempt in this library, which errs with probability at most 1.5 %: all with this confidence or "
        "more err together with probability at most 5 %."  # earlier ones may have been at less
    )
    for part in (attempts, "used for 2 compositions", "2nd use of the"):
        assert part in sentence
    assert replace(COMPLETE, use=1, attempt=AttemptCount(1, 1)).sentence() in sentence


def test_a_certificate_of_the_first_version_is_read() -> None:
    written = {
        "accuracy": 0.95, "confidence": 0.95, "delta": 0.050000000000000044, "alpha": 0.050000000000000044,
        "certified": True, "deployed": 0, "n": 600, "losses": 5, "agreement_lower_bound": 0.98,
        "required_inputs": 59, "settings": 3, "sentence": "With 95 % confidence it is.",
        "path": [{"losses": 5, "n": 600, "p_value": 1e-06, "passed": True}],
    }  # fmt: skip
    found = read(written)
    assert (found.certified, found.accuracy, found.confidence, found.inputs) == (True, 0.95, 0.95, 600)
    assert (found.share, found.by_class, found.walked_on, found.use) == (1.0, (), None, None)


def test_the_share_of_delta_follows_from_the_level_where_a_file_has_that_alone() -> None:
    written = COMPLETE.to_json()
    del written["share_of_delta"]
    assert read(written).share == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"path": 3},
            r"x.json: certificate: field 'path' is 3, expected a list, each an object; compose",
        ),
        ({"path": [{"losses": 1}]}, r"certificate: path\[0\]: has no field 'n'; compose again"),
        ({"accuracy": "high"}, "certificate: field 'accuracy' is 'high', expected a finite number"),
        ({"delta": None}, "certificate: field 'delta' is None, expected a finite number"),
        (
            {"delta": 0},
            r"certificate is damaged .*delta 0.0, but both must lie in \(0, 1\)\): compose again",
        ),
        ({"deployed": 0.5}, "field 'deployed' is 0.5, expected a whole number or null"),
        ({"deployed": 2}, "certificate is damaged .deployed is 2, but 2 settings were"),
        ({"engines": [{"backend": 1}]}, r"engines\[0\]: field 'backend' is 1, expected a string"),
        ({"previous": {}}, "certificate: previous: has no field 'accuracy'"),
    ],
)
def test_a_broken_certificate_is_named_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CompositionError, match=message) as caught:
        read({**COMPLETE.to_json(), **changes})
    assert "\n" not in str(caught.value)


def test_what_is_no_object_is_no_certificate() -> None:
    with pytest.raises(CompositionError, match=r"x.json: certificate: expected an object, got \[\]"):
        read([])
