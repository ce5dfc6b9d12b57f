"""An engine that only generates: weights and nothing else, 2 bytes a parameter in bf16.

Where there is a GPU, it keeps there what has room: first weights, which would cross the link in every pass, then keys
and values. A model that fits as a whole does not slide at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from slideformer.device import Device
from slideformer.engine.costs import ASSUMED, assumed
from slideformer.engine.fit import host_room
from slideformer.engine.generation import Generated, Generation, Told, listed_passes, pass_options, shape_of
from slideformer.engine.pass_costs import predicted_pass_s
from slideformer.engine.placement import MARGIN
from slideformer.engine.rates import DUPLEX, link_rate
from slideformer.errors import BadInput
from slideformer.layout import Layout, UnitKind
from slideformer.memory import Budget, Limit, State, home_nbytes
from slideformer.memory.passes import PassShape, pass_budget, pass_needs
from slideformer.model.decoder import Decoder
from slideformer.model.sampling import Sampling
from slideformer.native import HostKernels, available_cpus, load
from slideformer.schedule import PassOptions

MICRO_TOKENS = 8192
"""Most tokens of prompts that go through a block at once: enough to be worth a matrix product, and their activations of
an 8B model are some 2 GiB by `assumed`, which counts too much."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """resident: units whose weights are on the device; "auto": as many as have room, "all": every one, (): none.
    window: slots of the blocks that slide, if they have room: while a pass's tokens are chosen and the next one's
    rows are gathered, uploads go on as far as there are free ones. micro_tokens: most tokens of prompts that go
    through a block at once. max_gpu_memory, max_host_memory: bytes; None is what the machine has.
    ignore_memory_limits: go on all the same."""

    window: int = 4
    resident: tuple[int, ...] | str = "auto"
    micro_tokens: int = MICRO_TOKENS
    cpu_threads: int | None = None
    max_gpu_memory: int | None = None
    max_host_memory: int | None = None
    ignore_memory_limits: bool = False

    def __post_init__(self) -> None:
        if self.window < 1 or self.micro_tokens < 1:
            raise BadInput(f"window is {self.window} and micro_tokens {self.micro_tokens}, both must be at least 1")


class GenerationEngine:
    """Context manager: `close` ends its threads; the device is the caller's. budget: bytes by term and tier; shape,
    pass_options: what it was built for. predicted_pass_s: of a full pass after the first, from the link's rate as it is
    measured at the start; None on the CPU."""

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        options: GenerationOptions,
        *,
        prompt_lengths: Sequence[int],
        max_new_tokens: int,
        kernels: HostKernels | None = None,
    ) -> None:
        """For prompts of these lengths, or shorter ones. Weights are undefined until they are written (`write`).
        Raises BadInput, DoesNotFit.
        """
        self.decoder, self.device = decoder, device
        self.layout = decoder.layout.untrained()
        with ExitStack() as held:
            self.kernels = kernels or load(options.cpu_threads or available_cpus())
            if kernels is None:
                held.callback(self.kernels.close)
            if options.max_gpu_memory is not None:
                device.limit_memory(options.max_gpu_memory)
            fit = _Fit(decoder, self.layout, device, options)
            self.shape, self.pass_options = fit.choose(prompt_lengths, max_new_tokens)
            self.budget = fit.require(self.shape, self.pass_options)
            self.predicted_pass_s = _predicted_s(self.layout, self.shape, self.pass_options, device)
            self.state = State(
                self.layout,
                device,
                self.kernels,
                keep_residual=decoder.dtype is torch.float32,
                resident=self.pass_options.resident,
            )
            self._generation = Generation(decoder, device, self.kernels, self.state, self.shape, self.pass_options, {})
            held.callback(self._generation.close)
            self._held = held.pop_all()

    def write(self, unit: int, offset: int, values: torch.Tensor) -> None:
        """Set weights of a unit from `offset` on. values: 1-D, float, host."""
        self.state.write(unit, offset, values)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = lambda _: None) -> Generated:
        """New tokens for every prompt; blocks. told: hears of each pass. Raises BadInput, LaneFailure."""
        return self._generation.run(prompts, sampling, told)

    def close(self) -> None:
        """Wait for what is under way, and end the engine's threads."""
        self._held.close()

    def __enter__(self) -> GenerationEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _predicted_s(layout: Layout, shape: PassShape, options: PassOptions, device: Device) -> float | None:
    if device.kind == "cpu":
        return None
    rates = replace(ASSUMED["cuda"], link_nbytes=link_rate(device) / DUPLEX)  # nothing much comes back
    return predicted_pass_s(layout, shape, replace(options, first=False), rates)


class _Fit:
    """What lies where. Pure arithmetic, but for the memory that the device says is free."""

    def __init__(self, decoder: Decoder, layout: Layout, device: Device, options: GenerationOptions) -> None:
        self.decoder, self.layout, self.options, self.device = decoder, layout, options, device
        given = None if options.max_gpu_memory is None else Limit(options.max_gpu_memory, "max_gpu_memory")
        free = device.free_nbytes()
        limits = [] if given is None or free is None else [given]
        limits += [] if free is None else [Limit(free, "memory that is free on the GPU")]
        self.device_limit = min(limits, default=None)
        self.host_limit = host_room(options.max_host_memory)
        self._library_nbytes = device.library_nbytes(decoder.dtype)
        device.release_libraries()

    def choose(self, prompt_lengths: Sequence[int], max_new_tokens: int) -> tuple[PassShape, PassOptions]:
        """Fewer prompts at once, until they fit; then as much of the model on the device as has room."""
        tokens = self.options.micro_tokens
        shape = shape_of(self.decoder, prompt_lengths, max_new_tokens, tokens)
        chosen = self._place(shape)
        while not self._fits(shape, chosen) and (shape.rows > 1 or shape.micro_batches > 1):
            if shape.micro_batches > 1:
                shape = replace(shape, micro_batches=shape.micro_batches // 2)
            else:
                shape = replace(shape, rows=shape.rows // 2)
            chosen = self._place(shape)
        return shape, chosen

    def require(self, shape: PassShape, options: PassOptions) -> Budget:
        """Raises DoesNotFit."""
        found = self._budget(shape, options)
        placed = found if self.device_limit is not None else found.on_one_tier()
        if not self.options.ignore_memory_limits:
            advice = "Shorten the prompts, lower max_new_tokens, or take a machine with more memory"
            placed.require(self.device_limit, self.host_limit, advice=lambda: advice)
        return found

    def _fits(self, shape: PassShape, options: PassOptions) -> bool:
        found = self._budget(shape, options)
        placed = found if self.device_limit is not None else found.on_one_tier()
        return placed.fits(self.device_limit, self.host_limit)

    def _budget(self, shape: PassShape, options: PassOptions) -> Budget:
        needed = pass_needs(listed_passes(self.layout, options), self.layout, shape)
        fp32 = shape.dtype is torch.float32
        found = pass_budget(needed, self.layout, resident=options.resident, keep_residual=fp32)
        found.device["working memory"] = self._workspace_nbytes(shape)
        if shape.rows > 1:  # of unequal lengths, so that they are padded
            itemsize = shape.dtype.itemsize if self.decoder.attn_implementation == "eager" else 1
            mask = shape.rows * shape.prompt_length**2 * itemsize
            kinds = len({self.decoder.block_kind(index) for index in range(len(self.layout.blocks))})
            found.device["masks"] = (shape.micro_batches + 1) * kinds * mask
        return found

    def _workspace_nbytes(self, shape: PassShape) -> int:
        """Most that one op takes for a while: a block on whole prompts, or logits and their order; and what a matrix
        library keeps, here and on the stream of the model."""
        block = max(b.kept_nbytes for b in assumed(self.layout, shape.first, ASSUMED["cuda"]).blocks)
        if self.decoder.attn_implementation == "eager":
            heads = self.decoder.config.num_attention_heads
            block += shape.rows * heads * shape.prompt_length**2 * (shape.dtype.itemsize + 4)
        logits = 4 * 4 * shape.rows * shape.micro_batches * self.decoder.vocab_size
        return max(block, logits) + self._library_nbytes

    def _place(self, shape: PassShape) -> PassOptions:
        layout, given = self.layout, self.options.resident
        every = tuple(range(len(layout.units)))
        base = pass_options(shape, layout, window=self.options.window)
        if self.device_limit is None:  # the CPU: all memory is one
            resident = given if isinstance(given, tuple) else ()
            return replace(base, resident=resident, cached_on_device=len(layout.blocks) * shape.micro_batches)
        if isinstance(given, tuple) or given == "all":
            fixed = replace(base, resident=every if given == "all" else tuple(given))
            sliced = self._room(shape, fixed) < 0 and layout.output not in fixed.resident
            return self._with_caches(shape, replace(fixed, sliced_head=sliced))
        if self._room(shape, replace(base, resident=every)) >= 0:
            return self._with_caches(shape, replace(base, resident=every))
        if self._room(shape, base) < 0:
            base = replace(base, sliced_head=True)
        for window in (2, 1):
            if self._room(shape, base) < 0:
                base = replace(base, window=min(base.window, window))
        ends = [u for u in every if layout.units[u].kind is not UnitKind.BLOCK and (u or layout.tied)]
        resident = [] if base.sliced_head or self._room(shape, replace(base, resident=tuple(ends))) < 0 else ends
        base = replace(base, resident=tuple(resident))
        room = self._room(shape, base)
        for unit in layout.blocks:
            nbytes = home_nbytes(layout, unit, keep_residual=shape.dtype is torch.float32)
            if room < nbytes:
                break
            room -= nbytes
            resident.append(unit)
        return self._with_caches(shape, replace(base, resident=tuple(sorted(resident))))

    def _with_caches(self, shape: PassShape, options: PassOptions) -> PassOptions:
        """Keys and values on the device, as far as there is room beside the ring, which goes when all of them are."""
        pairs = len(self.layout.blocks) * shape.micro_batches
        every = replace(options, cached_on_device=pairs)
        if self._room(shape, every) >= 0:
            return every
        room = self._room(shape, options)
        return replace(options, cached_on_device=max(room, 0) // (shape.held_numel * shape.dtype.itemsize))

    def _room(self, shape: PassShape, options: PassOptions) -> int:
        """Bytes of the device that are left over; negative: missing."""
        assert self.device_limit is not None
        return int(self.device_limit.nbytes * (1 - MARGIN)) - self._budget(shape, options).device_nbytes
