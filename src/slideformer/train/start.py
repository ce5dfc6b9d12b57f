"""What is told of a run before its first step."""

from __future__ import annotations

from slideformer.engine.placement import placed
from slideformer.train.console import Console
from slideformer.train.loop import Work


def tell_start(work: Work, console: Console) -> None:
    """What is about to happen, in a few lines."""
    config, engine = work.config, work.engine
    rows, micro = config.per_device_train_batch_size, config.gradient_accumulation_steps
    console.note(
        f"{engine.layout.numel / 1e6:.1f} M parameters, {engine.layout.train_numel / 1e6:.1f} M of them trained, "
        f"on {work.device.kind} in {str(engine.decoder.dtype).removeprefix('torch.')}, {config.update_program} updates "
        f"({engine.kernels.isa}, {engine.kernels.threads} threads)"
    )
    console.note(f"on the device: {placed(engine.layout, engine.step_options)}")
    console.note(
        f"{work.num_steps} steps of {rows} x {micro} = {rows * micro} sequences of up to {config.max_length} tokens"
        f", {work.batches.steps_per_epoch} steps an epoch"
    )
    console.begin(work.num_steps, engine.memory())
