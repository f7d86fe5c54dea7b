"""Networks converted in a process of their own: the same models, at no cost to those who serve here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from subprocess import PIPE

import onnx
import pytest
import torch
from torch import Tensor, nn

from gati.adaptation.background import Background
from gati.engine.exits import EngineExit
from gati.engine.graph import apart, convert
from gati.engine.graph.apart import Apart, converting_apart, process_apart
from gati.engine.graph.assemble import assemble
from gati.engine.graph.convert import Converter, convert_here
from gati.engine.graph.stages import GraphStages, build_stages
from gati.errors import ModelError
from tests.engine.networks import BLOCKS, Cache, ready, traced_network
from tests.waiting import LONG_S

pytestmark = pytest.mark.slow  # it starts processes


class Refused(nn.Module):
    """Does what ONNX has no operator for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x)


def stages() -> GraphStages:
    torch.manual_seed(0)
    return build_stages(traced_network(), [EngineExit(BLOCKS[1], ready(Cache()), 0.5)], "logits")


@pytest.fixture(scope="module")
def process() -> Iterator[Apart]:
    """Starting it takes seconds, so tests share one; each asks in its own context."""
    found = Apart()
    yield found
    found.close()


@pytest.fixture
def here(process: Apart) -> Iterator[Apart]:
    token = apart._process.set(process)
    yield process
    apart._process.reset(token)


@pytest.fixture
def not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be converted in this process."""

    def refused(*_: object) -> None:
        raise AssertionError("converted beside those who serve")

    monkeypatch.setattr(convert, "convert_here", refused)


def test_segments_and_lookups_are_converted_to_the_same_models(here: Apart) -> None:
    found = stages()
    pieces = [*found.segments, *(lookup for lookup in found.lookups if lookup is not None)]
    assert len(pieces) == 3
    for piece in pieces:
        model = here.convert(piece.module, piece.example, "piece")
        assert model == convert_here(piece.module, piece.example, "piece").SerializeToString()


def test_a_network_is_put_together_of_what_came_back(here: Apart, not_here: None) -> None:
    model = assemble(stages(), "network", convert=Converter())
    onnx.checker.check_model(model)


def test_what_onnx_does_not_have_is_said_in_the_same_words(here: Apart) -> None:
    with pytest.raises(ModelError) as expected:
        convert_here(Refused().eval(), (torch.eye(3),), "odd")
    with pytest.raises(ModelError) as caught:
        here.convert(Refused().eval(), (torch.eye(3),), "odd")
    assert str(caught.value) == str(expected.value)


def test_what_cannot_be_sent_is_converted_here(here: Apart) -> None:
    class Local(Cache):  # no other process finds this class
        pass

    torch.manual_seed(0)
    found = build_stages(traced_network(), [EngineExit(BLOCKS[0], ready(Local()), 0.5)], "logits")
    assert found.lookups[0] is not None
    assert here.convert(found.lookups[0].module, found.lookups[0].example, "lookup") is None
    onnx.checker.check_model(assemble(found, "network", convert=Converter()))


def test_one_that_has_ended_is_started_again(here: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = stages().segments[0]
    first = here.convert(piece.module, piece.example, "piece")
    running, here._process = here._process, subprocess.Popen(["true"], stdin=PIPE, stdout=PIPE)
    here._process.wait()
    started: list[object] = []
    monkeypatch.setattr(apart, "_started", lambda: started.append(running) or running)  # it takes seconds
    assert here.convert(piece.module, piece.example, "piece") == first
    assert started == [running] and here._process is running


def test_work_in_the_background_converts_apart_and_leaves_no_process(not_here: None) -> None:
    models: list[object] = []
    errors: list[Exception] = []
    processes: list[Apart] = []

    def job() -> None:
        current = process_apart()
        assert current is not None
        processes.append(current)
        models.append(assemble(stages(), "network", convert=Converter()))

    worker = Background("test", limit=1, on_error=errors.append)
    worker.submit(job)
    assert worker.wait(LONG_S) and not errors and len(models) == 1
    assert processes[0]._process is not None
    number = processes[0]._process.pid
    worker.close(30.0)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    assert process_apart() is None  # this thread, which serves, has none


def test_no_process_is_started_for_nothing() -> None:
    with converting_apart() as found:
        assert process_apart() is found
    assert found._process is None and process_apart() is None
