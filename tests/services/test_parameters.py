"""What a request may contain: names of parameters and fields, and how its data are nested."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gati.errors import RequestError
from services.config import ServeConfig
from services.scheduler.protocol import InferenceRequest, parse_request
from services.scheduler.scheduler import Scheduler
from services.wire.tensors import from_tensor
from tests.services.engines import reply_of, served

TENSOR: dict[str, Any] = {"name": "input", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}


def parsed(tensor: dict[str, Any] = TENSOR, **fields: Any) -> InferenceRequest:
    return parse_request(json.dumps({"inputs": [tensor], **fields}).encode())


@pytest.mark.parametrize("name", ["slo", "slo_ms", "latency_slo", "Priority", "", "x" * 1000])
def test_an_unknown_parameter_is_refused(name: str) -> None:
    """Who sent `slo` believed that an SLO held."""
    with pytest.raises(
        RequestError, match="no parameter is called .*; there are latency_slo_ms, "
    ) as refused:
        parsed(parameters={name: 5})
    assert len(str(refused.value)) < 200


def test_what_belongs_in_the_parameters_is_refused_next_to_them() -> None:
    with pytest.raises(RequestError, match="no field is called 'latency_slo_ms'; there are id, parameters, "):
        parsed(latency_slo_ms=5)


def test_what_clients_of_other_servers_send_is_accepted() -> None:
    sequence = {"sequence_id": 3, "sequence_start": True, "sequence_end": False}
    parameters = {
        "content_type": "np",
        "headers": {},
        "timeout": 5000,
        "binary_data_output": True,
        **sequence,
    }
    found = parsed(parameters=parameters, model_name="m", model_version="1", id="one")
    assert (found.id, found.timeout_ms, found.latency_slo_ms) == ("one", 5.0, None)


@pytest.mark.parametrize(
    "where", ["/v2/models/m/infer?latency_slo_ms=5", "/v2/models/m/versions/first/infer?slo=5"]
)
def test_parameters_in_the_url_of_a_model_are_refused(where: str) -> None:
    """They were ignored, unlike those of a pipeline."""
    with served() as address:
        reply = reply_of("m", address, "POST", where, json={"inputs": [TENSOR]})
    assert (reply.status_code, "in `parameters` of the JSON" in reply.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        ([1, 2, 3, 4, 5, 6], [2, 3]),
        ([[1, 2, 3], [4, 5, 6]], [2, 3]),
        ([[[1, 2, 3], [4, 5, 6]]], [2, 3]),  # a batch of one, and not
        ([[1, 2, 3], [4, 5, 6]], [1, 2, 1, 3]),
        ([[1], [2]], [2]),
        ([[]], [1, 0]),
        ([[], []], [0, 2]),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], [2, 2, 2]),  # each picture in one row
        ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [2, 4]),
        ([7], []),
    ],
)
def test_data_are_nested_as_the_shape_says_or_flatter(data: Any, shape: list[int]) -> None:
    found = from_tensor(parsed({**TENSOR, "data": data, "shape": shape}).tensor)
    assert found.shape == tuple(shape)
    np.testing.assert_array_equal(found.ravel(), np.ravel(data))


@pytest.mark.parametrize(
    "data", [[[1, 2], [3, 4], [5, 6]], [[[1, 2]], [[3, 4]], [[5, 6]]], [[[1], [2]], [[3], [4]], [[5], [6]]]]
)
def test_data_nested_in_another_shape_are_refused(data: Any) -> None:
    """They were read in the order in which they came: of a transposed picture, nonsense was answered."""
    with pytest.raises(RequestError, match=r"`data` is nested as \[3, .*2.*\] but `shape` is \[2, 3\]"):
        parsed({**TENSOR, "data": data})


def test_only_clients_timeouts_are_limited() -> None:
    """The server's own default was cut to it, too."""
    scheduler = Scheduler(ServeConfig(request_timeout_ms=900_000.0), {}, {})
    own, given = (scheduler.timing(0.0, None, timeout_ms, None, None) for timeout_ms in (None, 900_000.0))
    assert (own.timeout_ms, given.timeout_ms) == (900_000.0, 600_000.0)
