"""A roster of versions that are but names, and answers for its tests."""

from __future__ import annotations

import torch

from gati.composition.composition import Composition
from gati.engine.exits import BASE, Prediction
from gati.guard.posts import Post
from gati.guard.roster import Roster, RosterChange


def said(class_index: int, exit: str) -> Prediction:
    return Prediction(class_index, torch.tensor([0.5, 0.5]), exit, "v")


TRUE, RIGHT, WRONG = said(0, BASE), said(0, "block"), said(1, "block")


class NamedVersions(Roster[str]):
    """Versions that are but names; settings open at once. `told` has the kinds of changes."""

    def __init__(self, serving: Post[str]) -> None:
        self.told: list[str] = []
        super().__init__(serving)

    def tell(self, kind: RosterChange, message: str) -> None:
        self.told.append(kind)

    def begin_opening(self, post: Post[str], level: int, kind: RosterChange, counted: str) -> None:
        self.opened(post, level, f"{post.version}-{level}", kind, counted)

    def figures(self, post: Post[str]) -> Composition | None:
        return None

    def on_serving(self, post: Post[str]) -> None:
        pass

    def on_promoted(self, post: Post[str]) -> None:
        pass

    def on_fell_back(self, post: Post[str]) -> None:
        pass

    def on_given_up(self, post: Post[str]) -> None:
        pass
