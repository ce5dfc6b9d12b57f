"""On CUDA: a run with state and saved inputs on disk equals the same run with them on the host, bit for bit."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from shapes import random_tokens, random_weight  # noqa: E402
from slideformer.data.batches import MicroBatch  # noqa: E402
from slideformer.device.cuda import CudaDevice  # noqa: E402
from slideformer.engine import Engine, EngineOptions  # noqa: E402
from slideformer.engine.options import CONTENTS  # noqa: E402
from slideformer.layout import Layout  # noqa: E402
from slideformer.model.decoder import Decoder  # noqa: E402

EVERY = [c for n in range(1, 5) for c in combinations(CONTENTS, n)]
STEPS = 5
CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def layout_of() -> Layout:
    return Decoder(CONFIG, dtype=torch.bfloat16, tile_numel=1 << 18).layout


def outcome(device: CudaDevice, **changes) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    """Losses and norms of the steps, and every plane after them."""
    decoder = Decoder(CONFIG, dtype=torch.bfloat16, tile_numel=1 << 18, device="cuda")
    options = EngineOptions(
        micro_batch_size=2, micro_batches=2, max_length=256, weight_decay=0.1, saved_on_device=0, **changes
    )
    batch = [MicroBatch(t, t) for t in random_tokens(0, 4, 256, CONFIG.vocab_size).split(2)]
    with Engine(decoder, device, options) as engine:
        for index, unit in enumerate(engine.layout.units):
            for param in unit.params:
                values = random_weight(param.name, param.shape, "cuda").cpu().flatten()
                engine.write(index, unit.offsets[param.name], values)
        results = [engine.step(batch, lr=2e-3) for _ in range(STEPS)]
        found = [(r.loss, r.grad_norm) for r in results]
        engine.synchronize()
        state = engine.state
        units = range(len(engine.layout.units))
        planes = [state.part(u, c, 0, state.extent(u, c)[0]).clone() for c in CONTENTS for u in units]
        if engine.folder is not None:
            assert engine.folder.reads.nbytes > 0 and engine.folder.writes.nbytes > 0
            assert (engine.folder.gds is not None) == engine.options.gds
    return found, planes


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_disk_and_host_runs_are_the_same(update, tmp_path):
    """Each block has another combination of contents on disk, and in one program the table and the final norm all."""
    layout = layout_of()
    disk = [(content, unit) for unit, chosen in zip(layout.blocks, EVERY, strict=False) for content in chosen]
    if update == "eager":
        disk += [(content, unit) for unit in (0, len(layout.units) - 1) for content in CONTENTS]
    program = {"update": update, "max_grad_norm": 0.0 if update == "eager" else 0.5}
    with CudaDevice() as device:
        losses, planes = outcome(device, **program)
        assert losses[0][0] - losses[-1][0] >= 0.5
        where = {"disk": tuple(disk), "saved_on_disk": 3, "offload_dir": str(tmp_path / "disk")}
        found, other = outcome(device, **program, **where)
        assert found == losses
        assert all(map(torch.equal, planes, other))
