"""What every device promises, as tests. A test module for one backend says `from device.contract import *` and defines
two fixtures: `device`, open, and `open_another`, which opens one like it.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from slideformer.device import Device, LaneFailure
from slideformer.errors import RunFailed

__all__ = [
    "test_a_failing_lane_drops_what_is_queued_and_wakes_every_waiter",
    "test_a_failure_while_others_wait_is_raised_in_the_caller_at_once",
    "test_a_lane_waits_for_marks_of_other_lanes",
    "test_a_lane_waits_for_nothing_else",
    "test_a_mark_of_finished_work_stays_readable_after_a_failure",
    "test_a_mark_says_when_its_work_is_done",
    "test_a_staged_copy_is_its_own_memory",
    "test_a_work_that_fails_while_the_device_is_closed_does_not_hang",
    "test_closed_lanes_refuse_work",
    "test_device_memory_is_shared_by_lanes",
    "test_lanes_run_at_once",
    "test_many_thousands_of_ops_leave_nothing_behind",
    "test_only_the_first_failure_counts",
    "test_page_lock_counts_exactly_what_was_locked",
    "test_peak_counts_what_was_handed_out",
    "test_spans_are_ordered_within_a_lane_and_across_a_wait",
    "test_synchronize_waits_for_every_lane",
    "test_threads_have_names_and_end_with_the_device",
    "test_work_of_a_lane_runs_in_order",
]

HOST_OR_NOT = pytest.mark.parametrize("host", [True, False], ids=["host lane", "device lane"])


class Boom(Exception):
    pass


def fail() -> None:
    raise Boom("it broke")


def nothing() -> None:
    pass


@HOST_OR_NOT
def test_work_of_a_lane_runs_in_order(device: Device, host):
    lane, seen = device.lane("one", host=host), []
    marks = [lane.run(lambda i=i: seen.append(i)) for i in range(200)]
    marks[-1].wait()
    assert seen == list(range(200))
    assert lane.name == "one"


@HOST_OR_NOT
def test_a_mark_says_when_its_work_is_done(device: Device, host):
    lane, go = device.lane("one", host=host), threading.Event()
    first, second = lane.run(lambda: go.wait(10)), lane.run(nothing)
    assert not first.completed and not second.completed
    go.set()
    second.wait()
    assert first.completed and second.completed
    first.wait()
    first.wait_issued()


def test_lanes_run_at_once(device: Device):
    """Each waits for the other to have begun."""
    begun = [threading.Event(), threading.Event()]

    def meet(me: int) -> None:
        begun[me].set()
        assert begun[1 - me].wait(10)

    marks = [device.lane(name, host=True).run(lambda i=i: meet(i)) for i, name in enumerate(("one", "two"))]
    for mark in marks:
        mark.wait()


@HOST_OR_NOT
def test_a_lane_waits_for_marks_of_other_lanes(device: Device, host):
    first, second, third = (device.lane(name, host=host or name == "first") for name in ("first", "second", "third"))
    seen, go = [], threading.Event()
    a = first.run(lambda: (go.wait(10), seen.append("a")))
    second.wait(a)
    b = second.run(lambda: seen.append("b"))
    third.wait(b)
    c = third.run(lambda: seen.append("c"))
    time.sleep(0.05)
    assert seen == []
    go.set()
    c.wait()
    assert seen == ["a", "b", "c"]


def test_a_lane_waits_for_nothing_else(device: Device):
    first, second = device.lane("first", host=True), device.lane("second", host=True)
    go = threading.Event()
    held = first.run(lambda: go.wait(10))
    second.run(nothing).wait()
    assert not held.completed
    go.set()


@HOST_OR_NOT
def test_a_failing_lane_drops_what_is_queued_and_wakes_every_waiter(device: Device, host):
    lanes = [device.lane(f"lane{i}", host=host) for i in range(3)]
    go, seen = threading.Event(), []
    lanes[0].run(lambda: go.wait(10))
    bad = lanes[0].run(fail, "the bad op")
    for lane in lanes[1:]:
        lane.wait(bad)
    later = [lane.run(lambda: seen.append("never")) for lane in lanes]
    go.set()
    for mark in [bad, *later]:
        with pytest.raises(LaneFailure) as caught:
            mark.wait()
        assert caught.value is device.failure
        mark.wait_issued()
        assert not mark.completed
    assert seen == []
    failure = device.failure
    assert (failure.lane, failure.label) == ("lane0", "the bad op")
    assert str(failure) == "lane lane0 failed in the bad op: Boom: it broke"
    assert isinstance(failure.__cause__, Boom)
    assert failure.__cause__.__traceback__ is not None
    with pytest.raises(LaneFailure):
        device.synchronize()


def test_a_failure_while_others_wait_is_raised_in_the_caller_at_once(device: Device):
    """Also in a caller who waits for a lane that is stuck."""
    stuck, bad = device.lane("stuck", host=True), device.lane("bad", host=True)
    go = threading.Event()
    mark = stuck.run(lambda: go.wait(10))
    threading.Timer(0.1, lambda: bad.run(fail, "late")).start()
    since = time.perf_counter()
    with pytest.raises(LaneFailure, match="lane bad failed in late"):
        mark.wait()
    assert time.perf_counter() - since < 1.0
    go.set()


def test_only_the_first_failure_counts(device: Device):
    first, second = device.lane("first", host=True), device.lane("second", host=True)
    failed = threading.Event()

    def fail_after() -> None:
        failed.wait(10)
        time.sleep(0.05)
        raise ValueError("second")

    late = second.run(fail_after, "late")
    early = first.run(fail, "early")
    with pytest.raises(LaneFailure):
        early.wait()
    failed.set()
    late.wait_issued()
    assert device.failure.label == "early"
    with pytest.raises(LaneFailure, match="early"):
        late.wait()


def test_a_mark_of_finished_work_stays_readable_after_a_failure(device: Device):
    lane = device.lane("one", host=True)
    done = lane.run(nothing)
    bad = lane.run(fail)
    with pytest.raises(LaneFailure):
        bad.wait()
    done.wait()
    start, end = done.span_s()
    assert 0 < start <= end
    assert done.completed


@HOST_OR_NOT
def test_spans_are_ordered_within_a_lane_and_across_a_wait(device: Device, host):
    device.anchor()
    since = time.perf_counter()
    first, second = device.lane("first", host=host), device.lane("second", host=host)
    marks = [first.run(lambda: time.sleep(1e-3)) for _ in range(3)]
    second.wait(marks[-1])
    marks.append(second.run(nothing))
    marks[-1].wait()
    spans = [mark.span_s() for mark in marks]
    slack = 0.0 if device.kind == "cpu" else 2e-3  # two clocks, tied at the anchor
    assert since - slack <= spans[0][0]
    assert spans[-1][1] <= time.perf_counter() + slack
    for (start, end), (next_start, _) in zip(spans, spans[1:], strict=False):
        assert start <= end <= next_start + slack


def test_synchronize_waits_for_every_lane(device: Device):
    seen: list[int] = []
    for i in range(3):
        device.lane(f"lane{i}", host=True).run(lambda i=i: (time.sleep(0.02), seen.append(i)))
    device.synchronize()
    assert sorted(seen) == [0, 1, 2]


def lane_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("slideformer-"))


def test_threads_have_names_and_end_with_the_device(open_another):
    before = lane_threads()
    with open_another() as device:
        lanes = [device.lane(name, host=name == "host") for name in ("host", "stream")]
        seen: list[str] = []
        for lane in lanes:
            lane.run(lambda lane=lane: seen.append(threading.current_thread().name)).wait()
        assert seen == ["slideformer-host", "slideformer-stream"]
        assert all(t.daemon for t in threading.enumerate() if t.name in seen), "a hung lane must not hold up the exit"
        queued = [lanes[0].run(lambda: time.sleep(1e-3)) for _ in range(20)]
    assert lane_threads() == before
    assert all(mark.completed for mark in queued), "closing lets the queues run dry"
    device.close()


def test_closed_lanes_refuse_work(open_another):
    with open_another() as device:
        lane = device.lane("one", host=True)
        assert not lane.closed
    assert lane.closed
    with pytest.raises(RunFailed, match="lane one was asked for a copy after its device was closed"):
        lane.run(nothing, "a copy")


def test_a_work_that_fails_while_the_device_is_closed_does_not_hang(open_another):
    with open_another() as device:
        first, second = device.lane("first", host=True), device.lane("second", host=False)
        bad = first.run(lambda: (time.sleep(0.05), fail()))
        second.wait(bad)
        second.run(nothing)
    assert isinstance(device.failure.__cause__, Boom)


def test_many_thousands_of_ops_leave_nothing_behind(device: Device):
    """Marks and closures go as the caller lets go of them."""
    import gc
    import weakref

    class Payload:
        pass

    lanes = [device.lane(f"lane{i}", host=True) for i in range(2)]
    kept: list[weakref.ref[Payload]] = []
    mark = lanes[0].run(nothing)
    for _ in range(5000):
        for mine, other in ((0, 1), (1, 0)):
            payload = Payload()
            kept.append(weakref.ref(payload))
            lanes[mine].wait(mark)
            mark = lanes[mine].run(lambda payload=payload: None)
            assert other != mine
    del payload
    mark.wait()
    device.synchronize()
    gc.collect()
    assert sum(ref() is not None for ref in kept) == 0
    assert len(lane_threads()) == 2


def test_device_memory_is_shared_by_lanes(device: Device):
    first, second = device.lane("first", host=False), device.lane("second", host=False)
    tensor = device.empty(1000, torch.float32)
    assert tensor.shape == (1000,) and tensor.device == device.torch_device
    filled = first.run(lambda: tensor.fill_(3.0))
    second.wait(filled)
    second.run(lambda: tensor.mul_(2.0)).wait()
    assert float(tensor.sum()) == 6000.0


def test_peak_counts_what_was_handed_out(device: Device):
    before = device.peak_nbytes()
    kept = [device.empty(numel, torch.bfloat16) for numel in (1 << 20, 3 << 20)]
    assert device.peak_nbytes() - before == sum(t.nbytes for t in kept) == 8 << 20


def test_page_lock_counts_exactly_what_was_locked(open_another):
    from slideformer.memory import Arena

    with open_another() as device:
        arenas = [Arena(nbytes, "test") for nbytes in (3 << 20, 5 * 4096)]
        for arena in arenas:
            assert arena.page_lock(device)
        assert Arena(0, "empty").page_lock(device)
        expected = [a.nbytes if device.kind == "cuda" else 0 for a in arenas]
        assert device.page_locked_nbytes == sum(expected)
        for _ in range(2):  # once is enough
            arenas[0].page_unlock(device)
            assert device.page_locked_nbytes == expected[1]
        assert arenas[0].page_lock(device) and device.page_locked_nbytes == sum(expected)
    assert device.page_locked_nbytes == 0


def test_a_staged_copy_is_its_own_memory(device: Device):
    source = torch.arange(10)
    staged = device.stage(source)
    source.zero_()
    assert staged.tolist() == list(range(10))
    target = device.empty(10, torch.int64)
    device.lane("one", host=False).run(lambda: target.copy_(staged, non_blocking=True)).wait()
    assert target.tolist() == list(range(10))
