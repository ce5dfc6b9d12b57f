"""Many calls in a few processes: lines are step.py's, and what engines share changes nothing that is measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import campaign
import pool
import step
from benchmarks.toys import toy
from campaign import read_calls, settings_of
from report import sift
from rules import name_of
from shapes import shape
from slideformer.device import open_device
from slideformer.engine import Engine, EngineOptions, fit, settle
from slideformer.engine.costs import ASSUMED, assumed
from slideformer.model.decoder import Decoder

TOY = "--shape tiny --num-layers 2 --batch 2 --seq 16 --steps 1 --warmup 1 --device cpu --cpu-threads 1"


def test_a_campaign_writes_the_lines_of_its_calls_and_goes_on_past_what_does_not_fit(tmp_path):
    calls, out = tmp_path / "calls", tmp_path / "step.jsonl"
    calls.write_text(
        f"# first\n{TOY} --cases ours-streamed:eager ours-streamed:deferred=1e9 megatrain\n\n"
        f"{TOY} --engine max_host_memory=1000 --cases ours-streamed\n{TOY} --cases ours-resident\n"
    )
    command = [sys.executable, campaign.__file__, str(calls), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1 and done.stderr.endswith("failed: 1:ours-streamed\n"), done.stderr
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    first = [line for line in lines if line["run"] == lines[0]["run"]]
    assert [name_of(line) for line in first] == ["ours-streamed:eager", "ours-streamed:deferred=1e+09"]
    assert [name_of(line) for line in lines[2:]] == ["ours-resident:eager"] and lines[2]["run"] != lines[0]["run"]
    assert sift(lines[2:])[1] == [] and sift(first)[1] == []
    assert [line["host_before_gib"] is None for line in lines] == [False, True, True]
    own = lines[0]["host_kinds_gib"]["anon"] - lines[0]["host_before_kinds_gib"]["anon"]
    assert 0 < own < lines[0]["host_peak_gib"] and lines[1]["host_before_kinds_gib"] is None
    assert lines[2]["command"].startswith("python benchmarks/campaign.py --shape tiny")
    assert "not here: no checkout of MegaTrain" in done.stdout and "does not fit" in done.stdout


def test_the_model_of_fsdp2_is_built_once_for_cases_that_differ_in_clipping():
    measurer, norms = campaign.Others(), []
    try:
        for norm in (0.0, 1e-9):
            found = measurer.measure(toy("fsdp2", max_grad_norm=norm))
            norms.append(found["loss"])
            if not norm:
                model = measurer._peer.model
    finally:
        torch.distributed.destroy_process_group()
    assert measurer._peer.model is model and measurer._peer.settings.max_grad_norm == 1e-9
    assert len(norms[0]) == len(norms[1]) == 4 and norms[0] != norms[1]  # it trains on


def test_no_case_begins_after_its_time(tmp_path, capsys):
    (tmp_path / "calls").write_text(f"{TOY} --cases fsdp2 stock-fwd-bwd\n")
    calls = read_calls(tmp_path / "calls")
    with campaign.Campaign(calls, tmp_path / "calls", None, None) as running:
        running.began = time.monotonic() - 2
        running.run(1.0)
    assert running.failed == ["0:fsdp2", "0:stock-fwd-bwd"] and "left out for want of time" in capsys.readouterr().out


def test_a_worker_that_dies_is_not_waited_for(tmp_path):
    worker = campaign.Worker("ours", tmp_path / "no-calls", None)
    assert worker.ask({"number": 0, "run": "r", "case": "ours-streamed"}, 100) is None


def test_calls_are_words_of_step(tmp_path):
    (tmp_path / "calls").write_text("--batch 4 --gpu-limit 6 --cases ours-streamed:deferred=2 stock-resident\n")
    (call,) = read_calls(tmp_path / "calls")
    ours, stock = (settings_of(call, name) for name in call.args.cases)
    assert (ours.batch, ours.gpu_limit_gib, ours.max_grad_norm, ours.update) == (4, 6.0, 2.0, "deferred")
    assert (stock.gpu_limit_gib, stock.max_grad_norm, stock.update) == (None, 0.0, None)
    (tmp_path / "calls").write_text("--run a --batch 4\n--run b --batch 8\n--run a --batch 16\n--batch 1\n")
    first, second, third, fourth = (call.run for call in read_calls(tmp_path / "calls"))
    assert first == third and len({first, second, fourth}) == 3
    (tmp_path / "calls").write_text("--cases ours-sunk\n")
    with pytest.raises(SystemExit, match="case is 'ours-sunk'"):
        read_calls(tmp_path / "calls")


@pytest.mark.parametrize("path", sorted(Path(campaign.__file__).parent.glob("calls/*.txt")), ids=lambda p: p.name)
def test_calls_that_are_kept_can_be_made(path):
    calls = read_calls(path)
    assert calls and all(settings_of(c, n).batch for c in calls for n in c.args.cases if n not in step.BESIDE)


def decoder_of(**changes: object) -> Decoder:
    return Decoder(shape("tiny", num_layers=2), dtype=torch.float32, tile_numel=4096, device=torch.device("cpu"))


def test_weights_that_are_put_in_place_are_those_that_are_written():
    options = EngineOptions(max_length=16, update="eager", max_grad_norm=0.0)
    with open_device("cpu") as device, Engine(decoder_of(), device, options) as engine:
        pool.fill(engine)
        for index, unit in enumerate(engine.layout.units):
            for param in unit.params:
                whole = pool.random_weight(param.name, param.shape, "cpu").flatten().float()
                start = unit.offsets[param.name]
                assert torch.equal(engine.read(index, start, start + whole.numel()), whole)


def test_the_machine_is_measured_again_for_less_memory_or_another_batch_and_for_no_other_reason(monkeypatch):
    asked = []

    def probe(decoder, device, options, kernels):
        asked.append((options.micro_batch_size, options.max_gpu_memory))
        found = assumed(decoder.layout, options.batch_shape(decoder.hidden_size, decoder.dtype), ASSUMED["cuda"])
        return found if options.max_gpu_memory > 1000 else replace(found, head=None)

    monkeypatch.setattr(settle, "probe", probe)
    kernels = type("Kernels", (), {"threads": 1})()
    with pool.measured_once(), open_device("cpu") as device:
        for batch, limit in ((4, 1000), (4, 1000), (4, 2000), (4, 1990), (4, 9000), (4, 1500), (8, 9000), (4, 1000)):
            options = EngineOptions(micro_batch_size=batch, max_gpu_memory=limit, update="eager", max_grad_norm=0.0)
            settle.probe(decoder_of(), device, options, kernels)
    assert asked == [(4, 1000), (4, 2000), (4, 1500), (8, 9000)]
    assert settle.probe is probe


def test_what_a_pool_could_hand_out_again_counts_as_free():
    before = fit.resident_nbytes
    with pool.HostPool() as held:
        held.reset(64 << 20)
        nothing = fit.resident_nbytes()
        view = held.mmap(-1, 48 << 20)
        taken = fit.resident_nbytes()
        held.reset(64 << 20)
        assert taken - nothing > 40 << 20 and abs(fit.resident_nbytes() - nothing) < 8 << 20
        del view
    assert fit.resident_nbytes is before
