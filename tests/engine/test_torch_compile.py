"""torch.compile as a backend: the network's answers, alone and in batches, and what it needs."""

from __future__ import annotations

import pytest
import torch

from gati.engine.backends import BACKENDS, get_backend
from gati.engine.engine import Engine
from gati.errors import BackendError
from tests.engine.networks import traced_network
from tests.engine.test_graph_backends import exits, requests


@pytest.mark.slow
@pytest.mark.skipif(not BACKENDS["torch-compile"].installed(), reason="needs a C++ compiler")
def test_compiled_segments_answer_as_eager_ones_alone_and_in_batches() -> None:
    traced, x = traced_network(), requests(20)
    fast, plain = (Engine(traced, exits(0.45, 0.4), backend=name) for name in ("torch-compile", "torch"))
    expected = plain(x)
    assert len({answer.exit for answer in expected}) > 1
    alone = [fast(row)[0] for row in x.split(1)]
    for answers in (alone, fast(x)):
        for ours, theirs in zip(answers, expected, strict=True):
            assert (ours.exit, ours.class_index) == (theirs.exit, theirs.class_index)
            assert torch.allclose(ours.probabilities, theirs.probabilities, atol=1e-5)
    for ours, theirs in zip(fast.base(x[:2]), plain.base(x[:2]), strict=True):
        assert torch.allclose(ours.probabilities, theirs.probabilities, atol=1e-5)


def test_without_a_compiler_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gati.engine.backends.torch_compile.shutil.which", lambda name: None)
    with pytest.raises(BackendError, match=r"needs a C\+\+ compiler .*apt-get install g\+\+"):
        get_backend("torch-compile")
