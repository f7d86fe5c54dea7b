"""Reading pipeline files: what a good one becomes, and what a bad one is told."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gati.errors import PipelineError
from gati.pipelines import CacheLibrary, Edge, PlainModel, load_pipeline, parse_pipeline
from gati.pipelines.measurements import (
    BehaviourMeasurement,
    Measurements,
    OptionMeasurement,
    StageMeasurement,
    measurements_file,
)
from gati.pipelines.pipeline import Finding, describe_source

Document = dict[str, Any]


def good() -> Document:
    def options() -> Document:
        return {
            "small": {"library": "small", "accuracy": 0.8, "latency_ms": [1, 1, 2]},
            "large": {"model": "m:large", "checkpoint": "w.pt", "accuracy": 0.9, "latency_ms": 4},
        }

    return {
        "class_names": ["car", "ship", "cat", "dog"],
        "stages": {
            "root": {"groups": {"vehicle": ["car", "ship"], "animal": ["cat", "dog"]}, "options": options()},
            "vehicles": {"classes": ["car", "ship"], "options": options()},
            "animals": {"classes": ["cat", "dog"], "options": options()},
        },
        "edges": [
            {"from": "root", "to": "vehicles", "when": "vehicle"},
            {"from": "root", "to": "animals", "when": ["animal"]},
        ],
    }


def test_a_good_one() -> None:
    found = parse_pipeline(good(), "folder/traffic.toml")
    assert (found.name, found.input, set(found.outputs)) == ("traffic", "root", {"vehicles", "animals"})
    assert found.stages["root"].labels == ("vehicle", "animal")
    assert found.edges[0] == Edge("root", "vehicles", frozenset({"vehicle"}))
    small, large = found.stages["root"].options.values()
    assert small.source == CacheLibrary(Path("folder/small"), "default")
    assert large.source == PlainModel("m:large", Path("folder/w.pt"))
    assert small.measured_latency.quantile_ms(0.66) == 1.0
    assert small.measured_latency.mean_ms == pytest.approx(4 / 3)


def remove(*path: str | int) -> Callable[[Document], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change


def put(value: Any, *path: str | int) -> Callable[[Document], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def add_edge(source: str, target: str) -> Callable[[Document], None]:
    return lambda document: document["edges"].append({"from": source, "to": target})


def add_stage(name: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document["stages"][name] = copy.deepcopy(document["stages"]["animals"])

    return change


SMALL = ("stages", "root", "options", "small")
IN_SMALL = "p.toml: stage 'root', option 'small'"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            [add_edge("animals", "root")],
            "p.toml: cycle root -> animals -> root; remove one of these edges",
            id="cycle",
        ),
        pytest.param(
            [add_edge("root", "birds")],
            "p.toml: edge root -> birds: unknown stage 'birds'; the stages are root, vehicles, animals",
            id="unknown stage",
        ),
        pytest.param(
            [add_stage("extra"), put("root", "input")],
            "p.toml: stage 'extra' is unreachable: no edge leads to it; add one, or remove it",
            id="unreachable stage",
        ),
        pytest.param(
            [add_stage("extra")],
            "p.toml: 'root' and 'extra' have no edge into them, and a pipeline has one input; "
            "add an edge, or remove a stage",
            id="two inputs",
        ),
        pytest.param(
            [remove("edges", 0, "when")],
            "p.toml: two outputs when 'root' says 'animal', 'vehicles' and 'animals'; "
            "join them in one stage, or let their conditions exclude each other",
            id="two outputs for a label",
        ),
        pytest.param(
            [remove("edges", 0, "when"), remove("edges", 1, "when")],
            "p.toml: two outputs, 'vehicles' and 'animals'; join them in one stage",
            id="two outputs",
        ),
        pytest.param(
            [remove("edges", 0), remove("stages", "vehicles")],
            "p.toml: no output when 'root' says 'vehicle': no edge matches; add an edge, or remove the label",
            id="a label without output",
        ),
        pytest.param(
            [remove(*SMALL, "latency_ms")],
            f"{IN_SMALL} has no measurements (latency_ms); run gati pipeline measure, "
            "or write it into the file",
            id="option without latency",
        ),
        pytest.param(
            [remove(*SMALL, "accuracy")],
            f"{IN_SMALL} has no measurements (accuracy); run gati pipeline measure, "
            "or write it into the file",
            id="option without accuracy",
        ),
        pytest.param(
            [put("plane", "edges", 0, "when")],
            "p.toml: edge root -> vehicles: 'root' has no label 'plane'; its labels are vehicle, animal",
            id="unknown label",
        ),
        pytest.param(
            [add_edge("root", "animals")],
            "p.toml: two edges root -> animals; write one, with the labels of both",
            id="edge twice",
        ),
        pytest.param(
            [put("cats", "input")],
            "p.toml: input 'cats' is not a stage; the stages are root, vehicles, animals",
            id="unknown input",
        ),
        pytest.param(
            [put("animals", "input")],
            "p.toml: input 'animals' comes after 'root'; name a stage without edges into it",
            id="input with an edge into it",
        ),
        pytest.param(
            [put(["car", "bike"], "stages", "vehicles", "classes")],
            "p.toml: stage 'vehicles': label 'bike': no class 'bike'; the classes are car, ship, cat, dog",
            id="unknown class",
        ),
        pytest.param(
            [put(["car", "cat"], "stages", "root", "groups", "vehicle")],
            "p.toml: stage 'root': class 'cat' belongs to 'vehicle' and to 'animal'; name it once",
            id="class in two groups",
        ),
        pytest.param(
            [remove("class_names"), remove("stages", "animals", "classes")],
            "p.toml: stage 'root': label 'vehicle': no class 'car'; the classes are ",
            id="no class names",
        ),
        pytest.param(
            [put(["car"], "stages", "root", "classes")],
            "p.toml: stage 'root' has both groups and classes; give only one",
            id="groups and classes",
        ),
        pytest.param(
            [put("m", *SMALL, "model")],
            f"{IN_SMALL} names both; give either library or model",
            id="library and model",
        ),
        pytest.param(
            [remove(*SMALL, "library")],
            f"{IN_SMALL} names neither; give either library or model",
            id="neither library nor model",
        ),
        pytest.param(
            [put(1.2, *SMALL, "accuracy")],
            f"{IN_SMALL}: accuracy is 1.2; give a number from 0 to 1",
            id="accuracy above 1",
        ),
        pytest.param(
            [put(10**400, *SMALL, "accuracy")],
            f"{IN_SMALL}: accuracy is 1{400 * '0'}; give a number from 0 to 1",
            id="accuracy beyond all numbers",
        ),
        pytest.param(
            [put([1.0, 0.0], *SMALL, "latency_ms")],
            f"{IN_SMALL}: latency_ms: latency 0 ms is not a number above zero; measure again",
            id="latency of zero",
        ),
        pytest.param(
            [put([], *SMALL, "latency_ms")],
            f"{IN_SMALL}: latency_ms: a latency distribution needs at least one measured latency; "
            "measure again",
            id="no latencies",
        ),
        pytest.param(
            [put(True, *SMALL, "acuracy")],
            f"{IN_SMALL}: unknown key 'acuracy'; did you mean accuracy?",
            id="unknown key",
        ),
        pytest.param(
            [put("maybe", *SMALL, "caches")],
            f"{IN_SMALL}: caches is 'maybe'; write true or false",
            id="caches neither true nor false",
        ),
        pytest.param(
            [put("../x", *SMALL, "composition")],
            f"{IN_SMALL}: composition '../x' is not a valid name; use letters, digits and . _ -, beginning "
            "with a letter or digit, at most 128 characters",
            id="composition that is a path",
        ),
        pytest.param(
            [put("a\0b", *SMALL, "library")],
            f"{IN_SMALL}: library is 'a\\x00b'; give a string in quotes",
            id="library that no path can be",
        ),
        pytest.param(
            [put(0, *SMALL, "caches")],
            f"{IN_SMALL}: caches is 0; write true or false",
            id="caches a number",
        ),
        pytest.param(
            [put({"vehicle": 0.5}, "stages", "root", "shares")],
            "p.toml: stage 'root': shares names vehicle; give one share for each of vehicle, animal",
            id="shares of some labels",
        ),
        pytest.param(
            [put({"vehicle": 0.5, "animal": 0.6}, "stages", "root", "shares")],
            "p.toml: stage 'root': shares sums to 1.1; make it 1",
            id="shares above 1",
        ),
        pytest.param(
            [put({}, "stages", "root", "options")],
            "p.toml: stage 'root': options is {}; give a table with at least one entry",
            id="no options",
        ),
        pytest.param(
            [remove("stages")],
            "p.toml: stages is None; give a table with at least one entry",
            id="no stages",
        ),
        pytest.param(
            [put("../x", "name")],
            "p.toml: name '../x' is not a valid name; use letters, digits and . _ -, beginning with a "
            "letter or digit, at most 128 characters",
            id="name that is a path",
        ),
        pytest.param(
            [put("", "name")],
            "p.toml: name '' is not a valid name; use letters, digits and . _ -, beginning with a "
            "letter or digit, at most 128 characters",
            id="empty name",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(changes: list[Callable[[Document], None]], message: str) -> None:
    document = good()
    for change in changes:
        change(document)
    with pytest.raises(PipelineError) as raised:
        parse_pipeline(document, "p.toml")
    assert str(raised.value) == message


def test_files(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"no pipeline file .*missing.toml; check the path"):
        load_pipeline(tmp_path / "missing.toml")
    with pytest.raises(PipelineError, match=r" is a folder; give the pipeline's TOML file$"):
        load_pipeline(tmp_path)
    file = tmp_path / "p.toml"
    file.write_text("stages = [", encoding="utf-8")
    with pytest.raises(PipelineError, match="not readable as TOML"):
        load_pipeline(file)


TOML = """
class_names = ["x", "y"]
[stages.only.options]
one = { library = "lib", composition = "c" }
"""


def measured(source: str = "lib c") -> Measurements:
    behaviour = BehaviourMeasurement(None, None, (0.5, 0.5), (1.0, 0.8), ((1.0,), (2.0, 3.0)))
    later = BehaviourMeasurement("zero", 1, (1.0, 0.0), (0.7, 0.8), ((3.0,), (3.0,)))
    option = OptionMeasurement(
        source, 0.9, (1.0, 2.0, 3.0), {"base": 1.0}, "torch", (0.9,), (behaviour, later)
    )
    stage = StageMeasurement(3, {"x": 0.25, "y": 0.75}, {"one": option})
    return Measurements("p", "data", "00", "cpu", 1, "now", {"only": stage})


def test_measurements_beside_the_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(TOML, encoding="utf-8")
    measured().save(measurements_file(file))
    found = load_pipeline(file).stages["only"]
    option = found.options["one"]
    assert found.shares == (0.25, 0.75)
    assert (option.accuracy, option.measured_latency.values_ms) == (0.9, (1.0, 2.0, 3.0))
    assert (option.level(0.95), option.level(0.5)) == (0, 1)
    assert option.behaviour(Finding("zero", 1)).accuracies == (0.7, 0.8)
    assert option.behaviour(Finding("zero", 0)) == option.behaviour() == option.behaviours[None]


def test_measurements_of_another_composition_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(TOML, encoding="utf-8")
    measured("lib other").save(measurements_file(file))
    with pytest.raises(PipelineError, match="was measured as lib other but is now lib c"):
        load_pipeline(file)
    assert load_pipeline(file, measured=False).stages["only"].options["one"].accuracy is None


def test_measurements_without_labels_say_that_these_are_missing(tmp_path: Path) -> None:
    """It was said to run the command that had just ended."""
    file = tmp_path / "p.toml"
    file.write_text(TOML, encoding="utf-8")
    found = measured()
    only = found.stages["only"]
    only.options["one"] = replace(only.options["one"], accuracy=None, levels=(), behaviours=())
    replace(found, stages={"only": replace(only, shares={})}).save(measurements_file(file))
    with pytest.raises(PipelineError, match="without labels, .* on labelled data, or write"):
        load_pipeline(file)
    file.write_text(TOML.replace('"c" }', '"c", accuracy = 0.5 }'), encoding="utf-8")
    option = load_pipeline(file).stages["only"].options["one"]
    assert (option.accuracy, option.measured_latency.values_ms) == (0.5, (1.0, 2.0, 3.0))


def test_measurements_with_other_labels_or_classes_do_not_count(tmp_path: Path) -> None:
    """The accuracy was that of other groups; other names of labels were said to be wrong shares."""
    file = tmp_path / "p.toml"
    file.write_text(TOML, encoding="utf-8")
    stage = measured().stages["only"]
    now = {"x": (0,), "y": (1,)}
    for classes, fits in ((None, True), (now, True), ({"x": (1,), "y": (0,)}, False)):
        kept = replace(measured(), stages={"only": replace(stage, classes=classes)})
        kept.save(measurements_file(file))
        assert Measurements.load(measurements_file(file)) == kept
        if fits:
            assert load_pipeline(file).stages["only"].options["one"].accuracy == 0.9
            continue
        with pytest.raises(PipelineError) as raised:
            load_pipeline(file)
        assert str(raised.value) == (
            f"{file}: stage 'only' was measured with other labels or classes; run gati pipeline measure"
        )
    renamed = replace(stage, shares={"x": 0.25, "z": 0.75})
    replace(measured(), stages={"only": renamed}).save(measurements_file(file))
    with pytest.raises(PipelineError, match="was measured with other labels or classes"):
        load_pipeline(file)
    own = TOML.replace('"c" }', '"c", accuracy = 0.5, latency_ms = 1.0 }')
    file.write_text(own, encoding="utf-8")  # nothing that was measured is needed
    found = load_pipeline(file).stages["only"]
    assert (found.options["one"].accuracy, found.shares) == (0.5, (0.5, 0.5))


def test_measurements_after_another_stage_do_not_count(tmp_path: Path) -> None:
    """Findings are kept by the name of the option, which stages often share."""
    file = tmp_path / "p.toml"
    stages = "".join(
        f'[stages.{name}.options]\none = {{ library = "lib", composition = "c" }}\n' for name in "abc"
    )
    text = f'class_names = ["x", "y"]\nEDGES\n{stages}'
    only = measured().stages["only"]
    kept = {name: replace(only, after=after) for name, after in (("a", ()), ("b", ("a",)), ("c", ("b",)))}
    for each in (kept, dict.fromkeys("abc", only)):
        replace(measured(), stages=each).save(measurements_file(file))
        file.write_text(text.replace("EDGES", _edges("ab", "bc")), encoding="utf-8")
        assert load_pipeline(file).stages["c"].options["one"].accuracy == 0.9
    file.write_text(text.replace("EDGES", _edges("ac", "cb")), encoding="utf-8")
    load_pipeline(file)  # earlier versions did not note it
    replace(measured(), stages=kept).save(measurements_file(file))
    with pytest.raises(PipelineError) as raised:
        load_pipeline(file)
    assert str(raised.value) == (
        f"{file}: stage 'c' was measured after 'b' but now follows 'a'; run gati pipeline measure"
    )


@pytest.mark.parametrize("given", ["latency_ms = 1.0", "accuracy = 0.85", "accuracy = 0.9, latency_ms = 1.0"])
def test_figures_in_the_file_do_not_make_every_answer_a_sure_one(tmp_path: Path, given: str) -> None:
    """An option with them has no levels, so the next stage's was what it is after the surest answers."""
    file = tmp_path / "p.toml"
    one = '{ library = "lib", composition = "c" }'
    stages = "".join(f"[stages.{name}.options]\none = {one}\ntwo = {one}\n" for name in "ab")
    file.write_text(f'class_names = ["x", "y"]\n{_edges("ab")}\n{stages}', encoding="utf-8")
    only = measured().stages["only"]
    overall = only.options["one"].behaviours[0]
    after = [replace(overall, after=name, level=level) for name in ("one", "two") for level in (0, 1)]
    first = replace(only.options["one"], behaviours=(overall,))
    second = replace(first, behaviours=(overall, *after))
    kept = {
        name: replace(only, options=dict.fromkeys(("one", "two"), option), after=tuple(before))
        for name, option, before in (("a", first, ""), ("b", second, "a"))
    }
    replace(measured(), stages=kept).save(measurements_file(file))
    every = [Finding(name, level) for name in ("one", "two") for level in (0, 1)]
    assert [*load_pipeline(file).stages["b"].options["one"].behaviours] == [None, *every]
    file.write_text(file.read_text().replace('"c" }', f'"c", {given} }}', 1), encoding="utf-8")
    found = load_pipeline(file).stages
    assert found["a"].options["one"].level(0.1) == 0, "the only one"
    for option in found["b"].options.values():
        assert [*option.behaviours] == [None, *every[2:]]
        assert option.behaviour(Finding("one", 0)) == option.behaviour()


def test_a_file_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    """Its invisible first character was an invalid statement."""
    file = tmp_path / "p.toml"
    text = TOML.replace('"c" }', '"c", accuracy = 0.5, latency_ms = 1.0 }')
    file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_pipeline(file).stages["only"].options["one"].accuracy == 0.5


def _edges(*pairs: str) -> str:
    listed = ", ".join(f'{{ from = "{source}", to = "{target}" }}' for source, target in pairs)
    return f"edges = [{listed}]"


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1}', '{"format": 7}', "[]"])
def test_damaged_measurements(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.toml"
    file.write_text(TOML, encoding="utf-8")
    measurements_file(file).write_text(text, encoding="utf-8")
    with pytest.raises(PipelineError, match="run gati pipeline measure|upgrade gati"):
        load_pipeline(file)


ONE = ("stages", "only", "options", "one")
LATER = (*ONE, "behaviours", 1)
IN_ONE = ": stage 'only', option 'one': "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(0, "format"), " has format 0, an older one; "),
        (put({}, "stages"), " has no stages; "),
        (put({"x": 1.5}, "stages", "only", "shares"), ": stage 'only': shares has 1.5, not from 0 to 1; "),
        (put("", *ONE, "source"), f"{IN_ONE}source is empty; "),
        (remove(*ONE, "exits"), ": stages: only: options: one: has no field 'exits'; "),
        (remove(*ONE, "backend"), ": stages: only: options: one: has no field 'backend'; "),
        (remove(*ONE, "levels"), ": stages: only: options: one: has no field 'levels'; "),
        (remove(*ONE, "behaviours"), ": stages: only: options: one: has no field 'behaviours'; "),
        (put(-0.5, *ONE, "accuracy"), f"{IN_ONE}accuracy has -0.5, not from 0 to 1; "),
        (put([2.0], *ONE, "levels"), f"{IN_ONE}levels has 2, not from 0 to 1; "),
        (put([1.0, -2.0], *ONE, "latency_ms"), f"{IN_ONE}latency_ms has -2, not above 0; "),
        (put([], *ONE, "latency_ms"), f"{IN_ONE}latency_ms is empty; "),
        (put([1.0], *LATER, "shares"), f"{IN_ONE}behaviours[1] needs one entry for each of 2 levels; "),
        (put([0.9] * 3, *LATER, "accuracies"), f"{IN_ONE}behaviours[1] needs one entry for each of 2 "),
        (put([[1.0]], *LATER, "latencies_ms"), f"{IN_ONE}behaviours[1] needs one entry for each of 2 "),
        (put([0.0, 7.0], *LATER, "shares"), f"{IN_ONE}behaviours[1]: shares has 7, not from 0 to 1; "),
        (put([0.0, 7.0], *LATER, "accuracies"), f"{IN_ONE}behaviours[1]: accuracies has 7, not from 0 "),
        (put([[3], [0]], *LATER, "latencies_ms"), f"{IN_ONE}behaviours[1]: latencies_ms has 0, not above "),
        (put([[3], []], *LATER, "latencies_ms"), f"{IN_ONE}behaviours[1]: latencies_ms is empty; "),
        (put(["a", "b"], *LATER, "after"), ": stages: only: options: one: behaviours[1]: field 'after' is ["),
    ],
)  # fmt: skip
def test_what_is_wrong_with_measurements_is_named(
    tmp_path: Path, change: Callable[[Document], None], message: str
) -> None:
    """Planning ended in a traceback, or another file was said to be wrong."""
    file = tmp_path / "p.toml"
    file.write_text(TOML, encoding="utf-8")
    kept = measurements_file(file)
    measured().save(kept)
    document = json.loads(kept.read_text(encoding="utf-8"))
    change(document)
    kept.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(PipelineError) as raised:
        load_pipeline(file)
    assert str(raised.value).startswith(f"{kept}{message}")
    assert str(raised.value).endswith("; run gati pipeline measure")


def test_a_network_in_a_file_is_relative_to_the_pipeline_and_described_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "p.toml"
    options = "".join(
        f'[stages.only.options.{name}]\nmodel = "{model}"\naccuracy = 0.9\nlatency_ms = 1.0\n'
        for name, model in (("own", "nets.py:build"), ("exported", "net.pt2"), ("zoo", "gati.zoo:resnet20"))
    )
    file.write_text(f'class_names = ["x", "y"]\n{options}', encoding="utf-8")
    monkeypatch.chdir("/")
    sources = [each.source for each in load_pipeline(file).stages["only"].options.values()]
    models = [f"{tmp_path}/nets.py:build", f"{tmp_path}/net.pt2", "gati.zoo:resnet20"]
    assert [each.model for each in sources if isinstance(each, PlainModel)] == models
    described = [describe_source(each, tmp_path) for each in sources]
    assert described == ["nets.py:build", "net.pt2", "gati.zoo:resnet20"]  # so copied folders compare equal


def test_a_library_with_its_whole_path_is_described_alike_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured in the pipeline's folder was refused when the file was named with its whole path."""
    file = tmp_path / "p.toml"
    file.write_text(TOML.replace('"lib"', f'"{tmp_path}/lib"'), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    source = load_pipeline("p.toml", measured=False).stages["only"].options["one"].source
    assert describe_source(source, Path(".")) == describe_source(source, tmp_path) == "lib c"
    (tmp_path / "serve").mkdir()
    assert (
        describe_source(source, Path("serve/..")) == describe_source(source, tmp_path / "serve/..") == "lib c"
    )
    measured(f"{tmp_path}/lib c").save(measurements_file(file))  # as older versions wrote it
    assert load_pipeline("serve/../p.toml").stages["only"].options["one"].accuracy == 0.9
