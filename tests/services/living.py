"""Live states that resemble a running stream, for tests of the live page and for its screenshots."""

from __future__ import annotations

import random
import time

import numpy as np
from numpy.typing import NDArray

from services.live import LiveState

EXITS = ("layer1.2", "layer2.3", "layer3.1")
LATENCIES_MS = {"layer1.2": 0.42, "layer2.3": 0.71, "layer3.1": 1.02, "base": 1.52}
REGIONS = {"left lane": (8, 96, 100, 80), "right lane": (168, 90, 130, 88)}
SCENES = ("running", "alarm", "lost", "ended")


class Clock:
    """The time of day, a while ago; told to go on."""

    def __init__(self, ago_s: float) -> None:
        self.now_s = time.time() - ago_s

    def __call__(self) -> float:
        return self.now_s


def picture(width: int = 320, height: int = 192) -> NDArray[np.uint8]:
    """A picture with something to be seen on it."""
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.stack((60 + rows // 3, 80 + columns // 5, 110 - rows // 4), axis=2)
    return image.astype(np.uint8)


def scene(name: str, image: NDArray[np.uint8] | None = None, answers: int = 700) -> LiveState:
    """A state of a stream of 20 pictures a second, with two regions each, after so many answers."""
    chance = random.Random(7)
    clock = Clock(answers / 40)
    state = LiveState("resnet56, composition default", promise=0.97, clock=clock)
    state.exits(EXITS)
    state.source("running")
    audits = losses = 0
    alarmed = False
    for k in range(answers):
        clock.now_s += 1 / 40
        late = k > 0.8 * answers
        if k == answers // 3:
            state.event("retraining", "on 4,812 answers of the last hour, after 3 epochs at 97.9 %")
        if k == answers // 2:
            state.no_audits()
            audits = losses = 0
            state.event("version", "v3 answers from now on: 1.68x expected, certified on 2,431 audits")
        if name == "alarm" and late and not alarmed:
            alarmed = True
            state.event("alarm", "9 of the last 31 audits differed where 3 % may; evidence 12,400")
            state.promise(None)
            state.event("retraining", "on 1,204 answers since the scene changed")
        leaves = "base" if alarmed else chance.choices((*EXITS, "base"), (34, 27, 14, 25))[0]
        latency_ms = LATENCIES_MS[leaves] * chance.lognormvariate(0.0, 0.08)
        label, region = list(REGIONS.items())[k % 2]
        state.publish(
            {
                "time_s": k / 40,
                "source": "rtsp://***@10.0.4.17/stream1",
                "region": region,
                "class_name": "automobile" if label == "left lane" else "truck",
                "probability": 0.94 if label == "left lane" else 0.71,
                "exit": leaves,
                "latency_ms": latency_ms * (6 if k % 233 == 0 else 1),
                "base_latency_ms": 1.56 + 0.02 * chance.random(),
                "version": "v3" if k >= answers // 2 else "v2",
            }
        )
        if k % 5 == 0:
            agreed = chance.random() > (0.25 if name == "alarm" and late else 0.012)
            audits, losses = audits + 1, losses + (not agreed)
            state.audit(agreed, audits, losses)
    state.frame(picture() if image is None else image)
    if name == "lost":
        state.source("reconnecting", "no picture for 5 s, attempt 3")
    elif name == "ended":
        state.source("ended", "the file is over")
    clock.now_s = time.time()
    return state
