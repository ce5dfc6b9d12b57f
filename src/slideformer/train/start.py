"""What is told of a run before its first step."""

from __future__ import annotations

from slideformer.engine.placement import placed
from slideformer.memory import size
from slideformer.schedule import three_digits
from slideformer.train.checkpoint import Progress
from slideformer.train.console import Console
from slideformer.train.loop import Work


def tell_start(work: Work, start: Progress, console: Console) -> None:
    """What is about to happen, in a few lines. start: how far the run is."""
    config, engine = work.config, work.engine
    rows, micro = config.per_device_train_batch_size, config.gradient_accumulation_steps
    console.note(
        f"{engine.layout.numel / 1e6:.1f} M parameters, {engine.layout.train_numel / 1e6:.1f} M of them trained, "
        f"on {work.device.kind} in {str(engine.decoder.dtype).removeprefix('torch.')}, {config.update_program} updates "
        f"({engine.kernels.isa}, {engine.kernels.threads} threads)"
    )
    head = "" if engine.decided.sliced_head else ", the output projection whole"
    console.note(f"on the device: {placed(engine.layout, engine.step_options)}{head}")
    if engine.budget.disk:
        console.note(_on_disk(work, start))
    together = engine.decided.micro_batch_size
    parts = f", {together} at a time" if config.auto_find_batch_size and together < rows else ""
    console.note(
        f"{work.num_steps} steps of {rows} x {micro} = {rows * micro} sequences of up to {config.max_length} tokens"
        f"{parts}, {work.batches.steps_per_epoch} steps an epoch"
    )
    console.begin(work.num_steps, engine.memory())


def _on_disk(work: Work, start: Progress) -> str:
    """What lies where, how much, and what a step and all of them move."""
    engine, steps = work.engine, work.num_steps - start.step
    terms = sorted(engine.budget.disk.items(), key=lambda pair: -pair[1])
    listed = ", ".join(f"{term} {size(nbytes)}" for term, nbytes in terms)
    read, written = engine.disk_reads_per_step / 1e9, engine.disk_writes_per_step / 1e9
    before = f", after {three_digits(start.disk_writes / 1e12)} TB by earlier starts" if start.disk_writes else ""
    gds = engine.folder.gds if engine.folder is not None else None
    straight = "" if gds is None else f", GPUDirect Storage {'real' if gds.real else 'emulated'}"
    return (
        f"on disk in {work.config.offload_dir}: {size(engine.budget.disk_nbytes)} ({listed}){straight}; "
        f"a step reads {three_digits(read)} GB and writes {three_digits(written)} GB, {steps:,} steps write "
        f"{three_digits(steps * written / 1e3)} TB{before}"
    )
