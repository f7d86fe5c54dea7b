"""A replica on a Ray cluster, without a cluster; `test_replicated` has a real one."""

from __future__ import annotations

import asyncio
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from gati.errors import ConfigError
from services.inference.settings import InferenceSettings

# importing Ray takes a second
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs gati[ray]")]


def test_restarts_are_still_counted_after_a_stop(tmp_path: Path) -> None:
    """A model that went to sleep had fewer restarts than before, as if its counter had begun anew."""
    from services.ray_hosts import RayReplica, _Seen

    async def main() -> None:
        replica = RayReplica(InferenceSettings(name="m", library=tmp_path), b"secret")
        replica._take(_Seen(running=True, restarts=3))
        await replica.stop(0.0)
        assert replica.restarts == 3
        replica._take(_Seen(running=True, restarts=1))  # of the next actor
        assert replica.restarts == 4
        await replica.stop(0.0)
        assert replica.restarts == 4

    asyncio.run(main())


@pytest.mark.parametrize("named_in", ["--ray", "RAY_ADDRESS"])
def test_a_wrong_address_is_told_at_once(monkeypatch: pytest.MonkeyPatch, named_in: str) -> None:
    """Ray tried for minutes, and ignored SIGTERM meanwhile."""
    import ray

    from services.ray_hosts import RayCluster

    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray is asked"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nothing listens there
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        if named_in == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
        with (
            pytest.raises(ConfigError, match=f"no Ray cluster answers at '{address}'"),
            RayCluster.connect("auto" if named_in == "RAY_ADDRESS" else address),
        ):
            pytest.fail("it is connected")
