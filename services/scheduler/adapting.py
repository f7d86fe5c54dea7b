"""The state of adaptation: the proofs of each model, the outcome of retraining, and when it runs next."""

from __future__ import annotations

import asyncio
from typing import Any

from gati.errors import GatiError
from services.scheduler.models import Model
from services.scheduler.reasons import without_folders
from services.supervisor import Supervised
from services.wire.client import connect_to
from services.wire.codec import Service
from services.wire.gen import Adaptation

_SERVICE = Service(Adaptation)
_TIMEOUT_S = 5.0


async def adaptation_status(models: dict[str, Model], adaptation: Supervised | None) -> dict[str, Any]:
    """A JSON document: the versions, proofs, memory and retraining status of every model.

    `retraining` is None where the adaptation process reports none. `error` says why that process does not
    answer; a model that does not answer has an `error` of its own.
    """
    retraining, why_not = await _retraining(adaptation)
    rows = await asyncio.gather(*(_model(model) for model in models.values()))
    for row in rows:
        row["retraining"] = retraining.get(row["name"])
    return {"models": rows, "error": why_not}


async def _model(model: Model) -> dict[str, Any]:
    row: dict[str, Any] = {"name": model.name, "ready": model.ready, "versions": [], "memory": None}
    try:
        found = await model.statistics()
    except GatiError as error:
        return {**row, "error": without_folders(str(error))}
    row["versions"] = [_version(each) for each in found.versions or ()]
    memory = found.memory
    if memory is not None:
        row["memory"] = {
            "agreement": memory.agreement,
            "level": memory.level,
            "settings": memory.settings,
            "places": memory.places,
            "answers": memory.answers,
            "proof": _proof(memory.proof, memory.agreement),
        }
    return row


def _version(version: Any) -> dict[str, Any]:
    return {
        "version": version.version,
        "active": version.active,
        "pending": bool(version.pending),
        "state": version.state,
        "promise": version.promise,
        "level": version.level,
        "settings": version.settings,
        "resting": bool(version.resting),
        "proof": _proof(version.proof, version.target),
    }


def progress_of(proof: Any) -> dict[str, int] | None:
    """The counts of a `ProofProgress`; None without a proof."""
    if proof is None:
        return None
    return {"audits": proof.audits, "losses": proof.losses, "needed": proof.needed}


def _proof(proof: Any, agreement: float | None) -> dict[str, Any] | None:
    progress = progress_of(proof)
    if progress is None:
        return None
    said = f"{proof.audits} of about {proof.needed} audits"
    return {**progress, "how_far": said if agreement is None else f"{agreement:g}: {said}"}


async def _retraining(adaptation: Supervised | None) -> tuple[dict[str, dict[str, Any]], str | None]:
    """The status of retraining by model, and the error if the adaptation process does not answer."""
    if adaptation is None:
        return {}, None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            client = connect_to(_SERVICE, await adaptation.address())
            await client.connect()
    except (GatiError, TimeoutError) as error:
        return {}, without_folders(f"the adaptation process does not answer: {error or adaptation.cause}")
    try:
        found = await client.call("status", timeout_s=_TIMEOUT_S)
    except GatiError as error:
        return {}, without_folders(f"the adaptation process does not answer: {error}")
    finally:
        await client.close()
    return {each.model: _attempts(each) for each in found}, None


def _attempts(status: Any) -> dict[str, Any]:
    return {
        "version": status.version,
        "samples": status.samples,
        "under_way": status.retraining,
        "began_s": status.began_s,
        "outcome": status.outcome,
        "message": status.message,
        "changed_s": status.changed_s,
        "hit_rate": status.hit_rate,
        "promised_hit_rate": status.promised_hit_rate,
        "next_s": status.next_s,
        "used_s": status.used_s,
        "share": status.share,
    }
