"""Decides what a run's options leave open: on a device of its own by its memory and short measurements, on the CPU
without, since nothing is gained there by keeping anything elsewhere."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from slideformer.device import Device
from slideformer.engine.ahead import auto_ahead
from slideformer.engine.costs import ASSUMED, Costs, assumed
from slideformer.engine.fit import Budgets, host_room, require_fit, spare_room
from slideformer.engine.offload import HostRoom, offloaded
from slideformer.engine.options import EngineOptions
from slideformer.engine.placement import Room, place
from slideformer.engine.probe import probe
from slideformer.engine.read_ahead import with_ring
from slideformer.engine.window import with_window
from slideformer.errors import DoesNotFit
from slideformer.memory import Budget
from slideformer.model.decoder import Decoder
from slideformer.native import HostKernels
from slideformer.schedule.collector import collector_put_off

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settled:
    """options: nothing in them is "auto", but for the rings between disk and host (`with_depth`). budget: bytes by term
    and tier. costs: what was measured; None on the CPU. host_nbytes: what there was for all of it. as_earlier: what was
    decided before has room here too, or there was none."""

    options: EngineOptions
    budget: Budget
    costs: Costs | None
    budgets: Budgets
    host_nbytes: int
    as_earlier: bool = True


@collector_put_off()
def settle(options: EngineOptions, decoder: Decoder, device: Device, kernels: HostKernels) -> Settled:
    """Raises BadInput, and DoesNotFit where there is no room for it, as it was given."""
    as_earlier = options.as_earlier()
    if as_earlier is None:
        return _settle_anew(options, decoder, device, kernels)
    with suppress(DoesNotFit):
        return _settle(as_earlier, decoder, device, kernels)
    return replace(_settle_anew(options, decoder, device, kernels), as_earlier=False)


def _settle_anew(options: EngineOptions, decoder: Decoder, device: Device, kernels: HostKernels) -> Settled:
    """Micro-batches as large as have room, if they may be smaller."""
    trial, failed = options, None
    while trial is not None:
        try:
            found = _settle(trial, decoder, device, kernels)
        except DoesNotFit as error:
            if not options.find_micro_batch:
                raise
            failed = failed or DoesNotFit(*error.args)  # its own traceback would keep what the try has on the device
            trial = halved(trial)
        else:
            if trial is not options:
                log.warning(
                    "micro-batches of %d rows have no room here: each is taken as %d of %d",
                    options.micro_batch_size,
                    trial.micro_batches // options.micro_batches,
                    trial.micro_batch_size,
                )
            return found
    assert failed is not None
    raise failed


def halved(options: EngineOptions) -> EngineOptions | None:
    """Twice as many micro-batches of half as many rows; None where they have one."""
    if options.micro_batch_size == 1:
        return None
    rows = -(-options.micro_batch_size // 2)
    return replace(options, micro_batch_size=rows, micro_batches=2 * options.micro_batches)


def _settle(options: EngineOptions, decoder: Decoder, device: Device, kernels: HostKernels) -> Settled:
    found = _on_cpu(options, decoder) if device.kind == "cpu" else _on_gpu(options, decoder, device, kernels)
    if options.window == "auto" and found.options.window == 1:
        log.warning("one block is on the device at a time, since two have no room: no upload runs ahead of the model")
    return found


def _on_cpu(options: EngineOptions, decoder: Decoder) -> Settled:
    host_nbytes = host_room(options.max_host_memory).nbytes
    budgets = budgets_of(decoder, None)
    warn_of_no_gpu(options)
    chosen = within_host(streamed(options, decoder), decoder, budgets, host_nbytes)
    return Settled(chosen, _fitting(chosen, decoder, "cpu", None, None, budgets), None, budgets, host_nbytes)


def _on_gpu(options: EngineOptions, decoder: Decoder, device: Device, kernels: HostKernels) -> Settled:
    if options.max_gpu_memory is not None:
        device.limit_memory(options.max_gpu_memory)
    free_nbytes = device.free_nbytes()
    limits = [n for n in (free_nbytes, options.max_gpu_memory) if n is not None]
    costs = probe(decoder, device, options, kernels)
    budgets = budgets_of(decoder, costs)
    host_nbytes = host_room(options.max_host_memory).nbytes
    spare_nbytes = spare_room(options.max_host_memory)
    room = Room(decoder.layout, options, costs, decoder.hidden_size, decoder.dtype, min(limits), budgets, spare_nbytes)
    chosen = with_disk(place(room), decoder, device.kind, budgets, host_nbytes)
    budget = _fitting(chosen, decoder, device.kind, costs, free_nbytes, budgets)
    if costs.head is None and not chosen.step_options(decoder.layout, decoder.dtype).sliced_head:
        raise DoesNotFit(
            f"the whole output projection does not run on the device with {options.micro_batch_size} x "
            f"{options.max_length} tokens: lower per_device_train_batch_size or max_length, or raise max_gpu_memory"
        )
    if chosen.ahead == "auto":
        chosen = replace(chosen, ahead=auto_ahead(decoder.layout, chosen, budget, costs, room.step_s))
        budget = _fitting(chosen, decoder, device.kind, costs, free_nbytes, budgets)
    return Settled(chosen, budget, costs, budgets, host_nbytes)


@collector_put_off()
def with_depth(settled: Settled, decoder: Decoder, kind: str) -> Settled:
    """With the depth of the rings between disk and host, by costs that know the disk's rate; on the CPU, where nothing
    is measured, by assumed ones. kind: of the device."""
    options = deepened(
        settled.options,
        decoder,
        kind,
        settled.costs or assumed_costs(settled.options, decoder, kind),
        settled.budgets,
        settled.host_nbytes,
    )
    return replace(settled, options=options, budget=settled.budgets.of(options))


def assumed_costs(options: EngineOptions, decoder: Decoder, kind: str) -> Costs:
    shape = options.batch_shape(decoder.hidden_size, decoder.dtype)
    return assumed(decoder.layout, shape, ASSUMED[kind], kind=kind)


def deepened(
    options: EngineOptions, decoder: Decoder, kind: str, costs: Costs, budgets: Budgets, host_nbytes: int
) -> EngineOptions:
    """What `with_ring` makes of the options on a device of this kind."""
    return with_ring(
        options,
        decoder.layout,
        costs,
        hidden_size=decoder.hidden_size,
        dtype=decoder.dtype,
        used=lambda trial: _used(trial, kind, budgets),
        host_nbytes=host_nbytes,
    )


def _used(options: EngineOptions, kind: str, budgets: Budgets) -> Budget:
    """On the CPU all is the host's."""
    found = budgets.of(options)
    return found.on_one_tier() if kind == "cpu" else found


def budgets_of(decoder: Decoder, costs: Costs | None) -> Budgets:
    """costs: where there is a device of its own."""
    return Budgets(decoder.layout, hidden_size=decoder.hidden_size, dtype=decoder.dtype, costs=costs)


def warn_of_no_gpu(options: EngineOptions) -> None:
    """For the CPU: what was asked for and only a GPU has."""
    if options.resident == "all":
        log.warning("placement: resident is for a GPU; on the CPU all memory is the host's, so all is streamed")
    if options.max_gpu_memory is not None:
        log.warning("max_gpu_memory limits a GPU; on the CPU max_host_memory limits everything")


def streamed(options: EngineOptions, decoder: Decoder) -> EngineOptions:
    """What the CPU makes of the options: all is streamed, but for units that were named."""
    if options.resident == "all":
        options = replace(options, resident=())
    ahead = () if options.ahead == "auto" else options.ahead
    return replace(unplaced(options, decoder), ahead=ahead, sliced_head=options.sliced_head is True)


def unplaced(options: EngineOptions, decoder: Decoder) -> EngineOptions:
    """Nothing stays on the device beside the window that was not said to."""
    return replace(
        options,
        saved_on_device=_saved_beside(options),
        resident=options.step_options(decoder.layout, decoder.dtype).resident,
        keep=() if options.keep == "auto" else options.keep,
        late=() if options.late == "auto" else options.late,
    )


def within_host(options: EngineOptions, decoder: Decoder, budgets: Budgets, host_nbytes: int) -> EngineOptions:
    """With the window and what lies on disk decided, where all memory is the host's."""
    return with_window(
        options,
        lambda trial: with_disk(trial, decoder, "cpu", budgets, host_nbytes),
        lambda found: _used(found, "cpu", budgets).host_nbytes <= host_nbytes,
    )


def _saved_beside(options: EngineOptions) -> int | None:
    """How many saved inputs stay on a device whose memory is the host's: all, unless some are to go to disk."""
    if options.saved_on_device != "auto":
        return options.saved_on_device
    return 0 if options.offload is not None and options.offload.saved else None


def _may_spill(options: EngineOptions) -> bool:
    """Saved inputs may go to disk, and nobody said how many."""
    return options.offload is not None and options.offload_dir is not None and options.offload.saved is None


def with_disk(options: EngineOptions, decoder: Decoder, kind: str, budgets: Budgets, host_nbytes: int) -> EngineOptions:
    """With what lies on disk decided, by `options.offload` and the memory that the host may give. kind: of the device.
    Allocates nothing."""

    def used(trial: EngineOptions) -> Budget:
        return _used(trial, kind, budgets)

    if kind == "cpu" and _may_spill(options) and used(options).host_nbytes > host_nbytes:
        options = replace(options, saved_on_device=0)  # all memory is the host's: beside it is only the disk
    shape = options.batch_shape(decoder.hidden_size, decoder.dtype)
    saved_nbytes = shape.micro_tokens * shape.hidden * shape.dtype.itemsize
    return offloaded(options, HostRoom(decoder.layout, decoder.dtype, used, host_nbytes, saved_nbytes))


def _fitting(
    options: EngineOptions,
    decoder: Decoder,
    kind: str,
    costs: Costs | None,
    free_nbytes: int | None,
    budgets: Budgets,
) -> Budget:
    return require_fit(
        decoder.layout,
        options,
        hidden_size=decoder.hidden_size,
        dtype=decoder.dtype,
        device_kind=kind,
        costs=costs,
        free_nbytes=free_nbytes,
        found=budgets.of(options),
    )
