"""The composition file: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gati.composition.composition import FORMAT, Composition, Exit, Expected
from gati.composition.walk import certify, certify_every_class
from gati.errors import CompositionError
from gati.types import TrialId


def composition() -> Composition:
    exits = tuple(
        Exit(
            trial_id=TrialId(f"b{block}"),
            block=f"layer1.{block}",
            block_index=block,
            variant="fc(512)",
            selector="margin",
            threshold=threshold,
            placement="inline",
            expected_hit_rate=0.4,
            expected_agreement=0.99,
            lookup_ms=0.05,
            memory_bytes=1234,
            exit_ms=0.5 + block,
        )
        for block, threshold in ((1, -1.25e-30), (4, 3.4e38))
    )
    return Composition(
        name="fast",
        objective="full",
        solver="highs",
        gap=0.0,
        alpha=None,
        accuracy_target=0.97,
        confidence=0.95,
        memory_limit_bytes=None,
        backend="torch",
        placement="inline",
        exits=exits,
        expected=Expected(1.0, 2.0, 2.0, 0.8, 0.985, 2468),
        certificate=certify([(0, 300)], 0.97, 0.05),
        checkpoint_sha256="ab" * 32,
        created="2026-01-01T00:00:00+00:00",
        note="a note",
        expected_from="replay",
    )


def test_what_is_saved_is_loaded(tmp_path):
    composition().save(tmp_path / "compositions" / "fast.json")
    assert Composition.load(tmp_path / "compositions" / "fast.json") == composition()


def test_variants_of_an_older_file_are_called_as_today() -> None:
    raw = json.loads(composition().to_json())
    for each in raw["exits"]:
        each["variant"] = "pool(64)"
    for version, variant in ((1, "pool-linear(64)"), (FORMAT, "pool(64)")):
        found = Composition.from_json(json.dumps({**raw, "format": version}))
        assert {each.variant for each in found.exits} == {variant}


def test_files_of_earlier_versions_do_not_name_the_files_of_their_caches() -> None:
    raw = json.loads(composition().to_json())
    for each, digest in zip(raw["exits"], ("ab" * 32, None), strict=True):
        each["cache_sha256"] = digest
    found = Composition.from_json(json.dumps(raw))
    assert [each.cache_sha256 for each in found.exits] == ["ab" * 32, None]
    assert Composition.from_json(found.to_json()) == found
    for each in raw["exits"]:
        del each["cache_sha256"]
    assert Composition.from_json(json.dumps(raw)) == composition()


def test_overlapped_lookups_had_one_core_in_earlier_versions_and_never_have_none() -> None:
    raw = json.loads(replace(composition(), lookup_cores=3).to_json())
    assert Composition.from_json(json.dumps(raw)).lookup_cores == 3
    with pytest.raises(
        CompositionError, match="lookup_cores is 0, expected at least 1; run gati compose again"
    ):
        Composition.from_json(json.dumps({**raw, "lookup_cores": 0}))
    del raw["lookup_cores"]
    assert Composition.from_json(json.dumps(raw)) == composition()


def test_a_composition_without_exits_is_a_composition():
    empty = replace(composition(), exits=(), certificate=None, gap=None, confidence=None)
    assert Composition.from_json(empty.to_json()) == empty


def test_a_missing_composition_names_those_that_are_there(tmp_path):
    composition().save(tmp_path / "fast.json")
    with pytest.raises(CompositionError, match="no composition 'slow' at .*: there are: fast$"):
        Composition.load(tmp_path / "slow.json")
    with pytest.raises(CompositionError, match="there is none yet; run gati compose"):
        Composition.load(tmp_path / "nowhere" / "slow.json")


def broken(**changes: object) -> str:
    document = json.loads(composition().to_json())
    exits = changes.pop("exit", {})
    document.update(changes)
    document["exits"][0].update(exits)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "x.json is damaged .*compose again", id="cut off"),
        pytest.param("[]", "x.json is damaged .expected an object, found list", id="a list"),
        pytest.param("{}", "x.json is damaged .no 'format'.: run gati compose again", id="empty"),
        pytest.param(
            broken(format=FORMAT + 1),
            f"x.json has format {FORMAT + 1}, this Gati reads up to {FORMAT}: .*upgrade gati",
            id="newer format",
        ),
        pytest.param(
            broken(placement="beside"), "'placement' is 'beside', expected 'inline' or", id="placement"
        ),
        pytest.param(
            broken(exit={"threshold": "high"}),
            r"exits\[0\]: field 'threshold' is 'high', expected a finite",
            id="text",
        ),
        pytest.param(broken(exit={"threshold": float("nan")}), "NaN is not JSON", id="nan"),
        pytest.param(broken(exit={"memory_bytes": 1.5}), "expected a whole number", id="half a byte"),
        pytest.param(broken(exit={"block_index": 4}), r"blocks \[4, 4\], expected forward order", id="order"),
        pytest.param(broken(expected=[]), "'expected' is ", id="expected"),
    ],
)
def test_a_damaged_composition_is_refused_in_one_line(text, message):
    with pytest.raises(CompositionError, match=message) as caught:
        Composition.from_json(text, where="x.json")
    assert "\n" not in str(caught.value)


# What it promises, and whether that is proven ------------------------------------------------------------

PROVEN = certify([(10, 1500)], 0.97, 0.05)
FAILED = certify([(400, 1500)], 0.97, 0.05)
EVERY_CLASS = certify_every_class([[(0, 400), (1, 500)]], 0.97, 0.05, ["cat", "dog"])


def test_files_of_earlier_versions_are_read_and_their_certificates_tell_of_classes():
    for certificate, expected in ((PROVEN, False), (EVERY_CLASS, True)):
        written = replace(composition(), certificate=certificate)
        document = json.loads(written.to_json())
        del document["per_class"]
        assert Composition.from_json(json.dumps(document)).per_class == expected
    with pytest.raises(CompositionError, match="field 'per_class' is 'yes', expected true or false"):
        Composition.from_json(json.dumps({**document, "per_class": "yes"}))


@pytest.mark.parametrize(
    ("changes", "certified", "why"),
    [
        ({}, True, ""),
        ({"certificate": None}, False, "there were no inputs to certify it on"),
        ({"confidence": None}, False, "it was composed without a confidence"),
        ({"certificate": FAILED}, False, FAILED.sentence()),
        ({"accuracy_target": 0.98}, False, "its certificate proves less"),
        ({"confidence": 0.99}, False, "its certificate proves less"),
        ({"per_class": True}, False, "its certificate proves less"),
        ({"per_class": True, "certificate": EVERY_CLASS}, True, ""),
        ({"accuracy_target": 0.96, "confidence": 1.0 - (1.0 - 0.95)}, True, ""),
    ],
)
def test_it_knows_whether_its_promise_is_proven(changes, certified, why):
    chosen = replace(composition(), **{"certificate": PROVEN, **changes})
    assert chosen.certified == certified
    assert bool(chosen.warning) == (not certified)
    assert chosen.warning.endswith(why)
    if why:
        assert chosen.warning.startswith("NOT CERTIFIED: nothing proves that at least 9")
        assert "\n" not in chosen.warning


def test_without_exits_there_is_something_to_prove_only_in_reduced_precision():
    empty = replace(composition(), exits=(), certificate=FAILED)
    assert not empty.certified
    assert empty.warning == ""
    assert replace(empty, backend="openvino-int8").warning.startswith("NOT CERTIFIED")
