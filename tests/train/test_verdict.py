"""The sentence names the lane that sets the pace, and says so when none does."""

from __future__ import annotations

import pytest

from slideformer.schedule import LaneName, Op, OpKind, Timeline
from slideformer.schedule.simulate import Span
from slideformer.train.verdict import BINDS, verdict


def worked(lane: LaneName, share: float) -> dict[str, float]:
    """As steps are told of: what lies between disk and host is one lane."""
    return Timeline((Span(Op(OpKind.FORWARD, lane, ()), 0, 0.0, share),)).worked_s()


@pytest.mark.parametrize("lane", LaneName)
def test_the_busiest_lane_binds_and_something_can_be_done_about_it(lane):
    others = {name: share for other in LaneName for name, share in worked(other, 0.1).items()}
    (name,) = worked(lane, 0.93)
    text = verdict({**others, **worked(lane, 0.93)}, 1.5, None)
    assert text.startswith(f"{name} binds: 93% of the step") and "a step takes 1.5 s." in text
    assert text.endswith(".") and len(text.split(". ")) == 2


def test_where_all_wait_for_each_other_no_lane_is_blamed():
    text = verdict({"compute": BINDS - 0.01, "update": 0.7, "upload": 0.2}, 1.0, 0.8)
    assert text.startswith("no lane binds: compute is busiest with 84% of the step (then update 70%, upload 20%)")
    assert "a step takes 1 s, 0.8 s by the plan." in text


def test_the_plan_s_promise_stands_beside_what_was_measured():
    assert "a step takes 1.37 s, 1.26 s by the plan." in verdict({"compute": 0.99}, 1.371, 1.264)
    text = verdict({"compute": 0.99}, 1.371, 1.264, 1.3)
    assert "a step takes 1.37 s, 1.26 s by the plan (1.3 s when clipped)." in text
