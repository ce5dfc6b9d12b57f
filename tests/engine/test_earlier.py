"""What the last bits depend on is decided as it was, where a run goes on: the head's way, and how many rows pass
together; anew where that has no room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.toys import toy_decoder, toy_options
from slideformer.device.cpu import CpuDevice
from slideformer.engine import Decided, Engine, EngineOptions
from slideformer.engine.settle import Settled, budgets_of, settle
from slideformer.errors import DoesNotFit
from slideformer.native import HostKernels, load

AUTO = {"saved_on_device": "auto", "resident": "auto", "keep": "auto", "micro_batch_size": 1, "max_length": 2}
WHOLE, SLICED = Decided(sliced_head=False), Decided(sliced_head=True)


class Card(CpuDevice):
    """Memory of its own, of which the options say how much may be used."""

    kind = "cuda"

    def free_nbytes(self) -> int:
        return 1 << 40


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch) -> None:
    monkeypatch.setattr("slideformer.device.cpu.MEASURED_S", 0.0)
    monkeypatch.setattr("slideformer.engine.probe.UPDATE_NUMEL", 1 << 16)


@pytest.fixture(scope="module")
def kernels() -> Iterator[HostKernels]:
    found = load(1)
    yield found
    found.close()


def settled(kernels: HostKernels, options: EngineOptions, device: type[CpuDevice] = Card) -> Settled:
    with device() as opened:
        return settle(options, toy_decoder(dtype=torch.bfloat16), opened, kernels)


def least_nbytes(options: EngineOptions, kernels: HostKernels) -> int:
    """What the options take on a Card at least, nothing beside the window."""
    costs = settled(kernels, options).costs
    smallest = replace(options, resident=(), keep=(), saved_on_device=0, window=1)
    return budgets_of(toy_decoder(dtype=torch.bfloat16), costs).of(smallest).device_nbytes


def test_a_head_stays_in_slices_where_the_whole_has_room_again(kernels):
    roomy = toy_options(**AUTO)
    assert settled(kernels, roomy).options.sliced_head is False
    kept = settled(kernels, replace(roomy, earlier=SLICED))
    assert kept.options.sliced_head is True and kept.as_earlier
    layout = toy_decoder().layout
    assert kept.options.step_options(layout, torch.bfloat16).sliced_head, "its state is not on the device"


def test_a_head_stays_whole_as_long_as_that_fits_at_all_and_is_chosen_anew_where_not(kernels):
    need = least_nbytes(toy_options(**AUTO, sliced_head=False), kernels)
    tight = toy_options(**AUTO, window=1, max_gpu_memory=need)
    assert settled(kernels, tight).options.sliced_head is True, "the share that is left to the allocator is not there"
    kept = settled(kernels, replace(tight, earlier=WHOLE))
    assert (kept.options.sliced_head, kept.as_earlier) == (False, True)
    anew = settled(kernels, replace(tight, earlier=WHOLE, max_gpu_memory=need - 1))
    assert (anew.options.sliced_head, anew.as_earlier) == (True, False)


class SmallCard(Card):
    """On which a block runs, and the head in slices, but not the whole of it."""

    def measure(self, work):
        if work.__name__ == "head":
            raise torch.OutOfMemoryError
        return super().measure(work)


def test_a_whole_head_that_did_not_run_is_not_taken_again_though_its_buffers_have_room(kernels):
    anew = settled(kernels, toy_options(**AUTO, earlier=WHOLE), SmallCard)
    assert anew.costs.head is None and (anew.options.sliced_head, anew.as_earlier) == (True, False)
    with pytest.raises(DoesNotFit, match="the whole output projection does not run on the device with 1 x 2 tokens"):
        settled(kernels, toy_options(**{**AUTO, "resident": "all"}), SmallCard)


def test_a_head_that_is_resident_takes_as_much_whatever_way_it_went_before(kernels):
    resident = toy_options(**{**AUTO, "resident": "all"})
    costs = settled(kernels, resident).costs
    costs = replace(costs, head=replace(costs.head, workspace_nbytes=1 << 30))
    budgets = budgets_of(toy_decoder(dtype=torch.bfloat16), costs)
    whole, sliced = (budgets.of(replace(resident, saved_on_device=None, sliced_head=way)) for way in (False, True))
    assert sliced.device == whole.device


def test_rows_pass_together_as_many_as_they_did(kernels):
    asked = toy_options(micro_batch_size=8, micro_batches=3, find_micro_batch=True)
    for rows, parts in ((8, 1), (3, 3), (2, 4), (1, 8)):
        found = settled(kernels, replace(asked, earlier=Decided(micro_batch_size=rows)), CpuDevice)
        assert (found.options.micro_batch_size, found.options.micro_batches) == (rows, 3 * parts)
        assert found.as_earlier


def test_rows_that_have_no_room_together_any_more_are_halved_anew(kernels):
    sizes = {"micro_batch_size": 8, "micro_batches": 3, "saved_on_device": 0, "window": 2}
    asked = toy_options(**sizes, find_micro_batch=True)

    def nbytes(rows: int) -> int:
        found = settled(kernels, replace(asked, micro_batch_size=rows, micro_batches=3 * -(-8 // rows)), CpuDevice)
        return found.budget.on_one_tier().host_nbytes

    assert nbytes(2) < nbytes(4) < nbytes(8) < nbytes(3), "the last has a row more than there are"
    for rows in (3, 4):
        tight = replace(asked, max_host_memory=nbytes(2), earlier=Decided(micro_batch_size=rows))
        found = settled(kernels, tight, CpuDevice)
        assert (found.options.micro_batch_size, found.options.micro_batches, found.as_earlier) == (2, 12, False)
    with pytest.raises(DoesNotFit, match="max_host_memory"):
        settled(kernels, replace(tight, max_host_memory=1), CpuDevice)


def test_what_is_given_wins(kernels):
    given = toy_options(**AUTO, sliced_head=False, earlier=Decided(True, 1))
    assert settled(kernels, given).options.sliced_head is False
    given = toy_options(micro_batch_size=8, earlier=Decided(False, 2))
    assert settled(kernels, given, CpuDevice).options.micro_batch_size == 8


@pytest.mark.parametrize("decided", [Decided(True, 1), Decided(False, 2)], ids=str)
def test_an_engine_says_what_it_decided_so_that_another_can_do_the_same(decided):
    options = toy_options(find_micro_batch=True, earlier=decided)
    with CpuDevice() as device, Engine(toy_decoder(), device, options) as engine:
        assert engine.decided == decided and engine.as_earlier
        assert engine.step_options.sliced_head is decided.sliced_head
