"""Latencies belong to the processor that they were measured on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gati.costs.graph import profile_between
from gati.costs.hardware import cpu_name, is_from_here, processor_name
from gati.costs.profile import measure_profile
from gati.types import Profile
from tests.engine.networks import traced_network


def test_a_profile_names_the_processor() -> None:
    found = measure_profile(traced_network(), repetitions=2)
    assert found.processor == cpu_name() != ""
    assert is_from_here(found)
    assert profile_between(found, "openvino", [0], [0.1], 1.0).processor == cpu_name()


def test_another_processor_is_not_this_one_and_an_unknown_one_counts_as_this() -> None:
    profile = Profile("torch", "cpu", 1, 1.0)
    assert is_from_here(profile)
    assert not is_from_here(replace(profile, processor="abacus"))


def test_a_gpu_has_its_own_name_or_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert processor_name("cuda") == "GPU cuda"
    assert processor_name("cuda:0") == "GPU cuda:0"
    assert processor_name("cuda:1") == ""
