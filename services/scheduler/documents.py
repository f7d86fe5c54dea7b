"""OpenAPI descriptions of requests and replies that the handlers parse and write without FastAPI models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.scheduler.parameters import UNUSED_FIELDS, UNUSED_PARAMETERS
from services.wire.tensors import LONGEST_PLACE

Responses = dict[int | str, dict[str, Any]]

_ERROR_SCHEMA = {
    "type": "object",
    "properties": {"error": {"type": "string", "description": "What was wrong and what to do."}},
    "required": ["error"],
}
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}


_REASONS = {
    400: "Malformed, or the wrong shape",
    401: "The key is missing or wrong",
    404: "No model, version or pipeline with that name",
    409: "Not possible in the current state",
    413: "Too large, compressed or decompressed",
    422: "Invalid values",
    429: "Overloaded: the latency SLO would be missed, the queue is full, or a quota is used up",
    503: "Not loaded, starting, shutting down, or lost",
    504: "The deadline passed",
}


def error_replies(reasons: Mapping[int, str]) -> Responses:
    """Descriptions of replies with an error, from the reason for each status."""
    return {
        status: {
            "description": reason,
            "content": {"application/json": {"schema": _ERROR_SCHEMA}},
            **({"headers": _RETRY} if status in (429, 503) else {}),
        }
        for status, reason in reasons.items()
    }


def _errors(*statuses: int) -> Responses:
    return error_replies({status: _REASONS[status] for status in statuses})


_NUMBER = {"type": "number", "exclusiveMinimum": 0, "maximum": 3_600_000}
_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {
            "type": "string",
            "description": "`input`, `text`, `recording`, or the name of an input in the model metadata.",
        },
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 8},
        "datatype": {"type": "string", "enum": ["FP32", "UINT8", "INT64", "INT32", "BOOL", "BYTES"]},
        "parameters": {
            "type": "object",
            "properties": {"binary_data_size": {"type": "integer", "minimum": 0}},
        },
        "data": {
            "type": "array",
            "items": {},
            "description": "Numbers, nested or flat in row-major order, or strings.",
        },
    },
}
_WISHES: dict[str, Any] = {
    "latency_slo_ms": {**_NUMBER, "description": "Latency limit for the answer, in milliseconds."},
    "timeout_ms": {**_NUMBER, "description": "Time after which the client gives up, in milliseconds."},
    "priority": {
        "type": "integer",
        "minimum": 0,
        "maximum": 10,
        "description": "1 is the highest priority; 2 is the default, and so is 0.",
    },
    "place": {
        "type": "string",
        "minLength": 1,
        "maxLength": LONGEST_PLACE,
        "description": "The source of the input, such as a camera; memory keeps each place apart.",
    },
}
_UNUSED = {"description": "Has no effect."}
_INFERENCE_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string"},
        **dict.fromkeys(UNUSED_FIELDS, _UNUSED),
        "parameters": {
            "type": "object",
            "properties": {
                **_WISHES,
                "timeout": {"type": "number", "description": "As `timeout_ms`, in microseconds."},
                "binary_data_output": {"type": "boolean"},
                **dict.fromkeys(UNUSED_PARAMETERS, _UNUSED),
            },
            "additionalProperties": False,
        },
        "inputs": {"type": "array", "items": _TENSOR, "minItems": 1},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {
                        "type": "string",
                        "enum": ["probabilities", "class_index", "class_name", "exit"],
                    },
                    "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
                },
            },
        },
    },
    "example": {
        "inputs": [{"name": "input", "shape": [1, 1, 1, 2], "datatype": "FP32", "data": [0.5, -0.5]}],
        "parameters": {"latency_slo_ms": 20},
    },
}


def _body(content: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {"requestBody": {"required": required, "content": content}}


def _json_body(schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    return _body({"application/json": {"schema": schema}}, required=required)


SERVER: Responses = _errors(400, 401, 413)
METRICS: Responses = {
    200: {"description": "Metrics in the format of Prometheus", "content": {"text/plain": {}}}
}
READY: Responses = _errors(401, 404) | {503: {"description": "Not ready, with the reason"}}
MODEL: Responses = _errors(401, 404, 503)
PIPELINE: Responses = _errors(401, 404)
INFER: Responses = _errors(400, 401, 404, 413, 422, 429, 503, 504)
QUERY: Responses = INFER
LOAD: Responses = _errors(400, 401, 404, 409, 413, 422, 503, 504)

INFER_BODY = _json_body(_INFERENCE_REQUEST)
INDEX_BODY = _json_body({"type": "object", "properties": {"ready": {"type": "boolean"}}}, required=False)


def _parameters_body(properties: dict[str, Any]) -> dict[str, Any]:
    inner = {"type": "object", "properties": properties, "additionalProperties": False}
    return _json_body({"type": "object", "properties": {"parameters": inner}}, required=False)


LOAD_BODY = _parameters_body({"composition": {"type": "string"}, "version": {"type": "string"}})
UNLOAD_BODY = _parameters_body({"version": {"type": "string"}, "unload_dependents": {"type": "boolean"}})

_BINARY = {"schema": {"type": "string", "format": "binary"}}
QUERY_BODY = _body(
    {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image"],
                "properties": {"image": {"type": "string", "format": "binary"}, **_WISHES},
            }
        },
        "image/png": _BINARY,
        "image/jpeg": _BINARY,
        "text/plain": {"schema": {"type": "string"}},
        "audio/wav": _BINARY,
        "audio/flac": _BINARY,
        "application/json": {"schema": _INFERENCE_REQUEST},
    }
) | {
    "parameters": [
        {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in _WISHES.items()
    ]
}
