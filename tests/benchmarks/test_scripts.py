"""The scripts as they are called: one line of JSON a run, one `run` a call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import disk
import host_memory
import link
import optimizer
import pool
import product
import step
import step_kernels
import sweep
from report import report, sift
from rules import name_of
from slideformer.memory import Arena
from targets import targets

STEP = Path(__file__).parents[2] / "benchmarks" / "step.py"


def called(monkeypatch: pytest.MonkeyPatch, script: object, out: Path, *words: str) -> list[dict]:
    monkeypatch.setattr(sys, "argv", [str(script.__file__), *words, "--run", "r1", "--out", str(out)])
    script.main()
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert sift(lines)[1] == [] and {line["run"] for line in lines} == {"r1"}
    assert report(out) == 0
    return lines


def test_link_measures_each_way_alone_and_both_at_once(monkeypatch, tmp_path):
    lines = called(monkeypatch, link, tmp_path / "l.jsonl", "--gib", "0.002", "--pieces", "1,2", "--repeats", "2")
    cases = ["h2d", "d2h", "both-h2d", "both-d2h"]
    assert [(x["case"], x["piece_mib"]) for x in lines] == [(c, p) for p in (1, 2, 2) for c in cases]
    for line in lines:
        assert line["gbps"] == pytest.approx(line["nbytes"] / line["step_s"]["median"] / 1e9, rel=0.01, abs=0.01)


def test_link_copies_every_byte():
    ways = link.make(1000, torch.device("cpu"), pinned=True)
    ways.device_up.zero_(), ways.host_down.zero_()
    link.seconds(ways, ("h2d", "d2h"), 300)
    assert torch.equal(ways.device_up, ways.host_up) and torch.equal(ways.host_down, ways.device_down)


def test_disk_measures_the_store_beside_a_loop_and_leaves_nothing(monkeypatch, tmp_path):
    (tmp_path / "d").mkdir()
    sizes = ("--gib", "0.002", "--block-mib", "0.0625", "--extent-mib", "0.25", "--threads", "2", "--seconds", "0")
    lines = called(monkeypatch, disk, tmp_path / "d.jsonl", "--folder", str(tmp_path / "d"), *sizes)
    beside = [f"{name}-{kind}" for kind in ("write", "read", "mix") for name in ("loop", "store", "unsummed")]
    engines = [f"{name}-{kind}" for kind in ("write", "read", "mix") for name in ("threads", "io_uring")]
    assert [line["case"] for line in lines] == [*beside, "loop-mix-busy", "store-mix-busy", *engines]
    rates = {line["case"]: line["nbytes"] / line["step_s"]["median"] for line in lines}
    for line in lines:
        assert line["gbps"] == pytest.approx(rates[line["case"]] / 1e9, rel=0.01, abs=0.01)
        kind = line["case"].split("-", 1)[1]
        best = max(rates[f"loop-{kind}"], rates.get(f"threads-{kind}", 0))
        assert line["ratio"] == pytest.approx(rates[line["case"]] / best, rel=0.01, abs=0.01)
    assert list((tmp_path / "d").iterdir()) == []


def test_disk_measures_the_loop_for_as_long_as_it_is_told_and_only_what_it_is_told(monkeypatch, tmp_path):
    sizes = ("--gib", "0.002", "--block-mib", "0.0625", "--extent-mib", "0.25", "--threads", "2", "--seconds", "0")
    words = ("--folder", str(tmp_path), *sizes, "--only", "loop", "store", "--sustain", "0.3")
    lines = called(monkeypatch, disk, tmp_path / "d.jsonl", *words)
    cases = [f"{name}-{kind}" for kind in ("write", "read", "mix") for name in ("loop", "store")]
    assert [line["case"] for line in lines] == [*cases, "loop-mix-long"]
    once, long = (next(line for line in lines if line["case"] == case) for case in ("loop-mix", "loop-mix-long"))
    assert long["step_s"]["median"] >= 0.3 and long["nbytes"] % once["nbytes"] == 0 and long["nbytes"] > once["nbytes"]
    assert long["gbps"] == pytest.approx(long["nbytes"] / long["step_s"]["median"] / 1e9, rel=0.01, abs=0.001)
    assert long["ratio"] == pytest.approx(long["gbps"] / once["gbps"], rel=0.05)


def test_disk_that_compares_with_nothing_is_refused(monkeypatch, tmp_path):
    for only in (["busy", "loop"], ["engines"]):
        monkeypatch.setattr("sys.argv", ["disk.py", "--folder", str(tmp_path), "--only", *only])
        with pytest.raises(SystemExit) as ended:
            disk.main()
        assert ended.value.code == 2


def test_host_memory_is_measured_in_processes_of_their_own_and_falls_from_the_run_without(tmp_path):
    (tmp_path / "d").mkdir()
    sizes = "--shape tiny --num-layers 2 --seq 16 --steps 1 --device cpu --cpu-threads 1 --tile-numel 4096".split()
    out = tmp_path / "h.jsonl"
    words = ("--shares", "0.5", "--folder", str(tmp_path / "d"), *sizes, "--out", str(out))
    command = [sys.executable, host_memory.__file__, *words]  # it forks, and threads of this process would be missing
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert sift(lines)[1] == [] and len({line["run"] for line in lines}) == 1 and report(out) == 0
    cases = ("optimizer=0,weights=0", "optimizer=0.5,weights=0", "optimizer=1,weights=0", "optimizer=1,weights=0.5")
    assert [(line["case"], line["falls_from"]) for line in lines] == [
        *((case, cases[0]) for case in cases[:3]), (cases[3], cases[2]),
    ]  # fmt: skip
    by_case = dict(zip(cases, lines, strict=True))
    for line in lines:
        for found in ("planned", "resident"):
            fall = by_case[line["falls_from"]][f"{found}_gib"] - line[f"{found}_gib"]
            assert line[f"{found}_fall_gib"] == pytest.approx(fall, abs=0.0011)
        assert (line["disk_gib"] > 0) == (line["case"] != cases[0])
    assert list((tmp_path / "d").iterdir()) == []


def test_a_fall_of_host_memory_that_is_not_the_planned_one_is_told():
    line = {"bench": "host_memory", "case": "a", "falls_from": "b", "planned_fall_gib": 10.0, "peak_fall_gib": 10.3}
    told = [list(targets([{**line, "resident_fall_gib": measured}])) for measured in (10.44, 9.56, 10.46, 9.54)]
    assert [[target.met for target in each] for each in told] == [[True], [True], [False], [False]]
    assert list(targets([{**line, "resident_fall_gib": 0.0, "falls_from": "a"}])) == []


def test_the_loop_of_disk_reads_back_what_it_wrote(tmp_path):
    loop = disk.Loop(tmp_path / "blocks", 8 * disk.ALIGNED, disk.ALIGNED, 2, 4 * disk.ALIGNED)
    first, second = loop.shares
    assert [(share.start, share.stop) for share in loop.shares] == [(0, 16384), (16384, 32768)]
    written = bytes(second.memory)
    for share in loop.shares:
        share.memory[:] = bytes(len(share.memory))
        share.read()
    assert bytes(second.memory) == written and first.memory[:8] == (2 * disk.ALIGNED).to_bytes(8, "little")
    os.close(loop.file)


def test_a_file_too_small_for_its_blocks_is_refused(monkeypatch, tmp_path):
    words = ("--folder", str(tmp_path), "--gib", "0.03", "--block-mib", "16", "--extent-mib", "1", "--threads", "4")
    with pytest.raises(SystemExit, match="0.03 GiB are not two extents, or two blocks a thread: raise --gib or lower"):
        called(monkeypatch, disk, tmp_path / "d.jsonl", *words)


def test_the_optimizer_is_measured_beside_the_stream_loop(monkeypatch, tmp_path):
    words = ("--numel", "40000", "--tile", "16384", "--threads", "1", "--steps", "1", "--only-native")
    (line,) = called(monkeypatch, optimizer, tmp_path / "o.jsonl", *words)
    assert line["case"] == "ours" and line["stream_gbps"] > 0


def test_a_call_goes_on_past_a_peer_that_is_not_here(tmp_path):
    out = tmp_path / "step.jsonl"
    words = "--shape tiny --num-layers 2 --batch 2 --seq 16 --steps 1 --warmup 1 --device cpu --cpu-threads 1".split()
    command = [sys.executable, str(STEP), *words, "--cases", "megatrain", "ours-streamed:deferred", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "not here: megatrain: no checkout of MegaTrain: give its folder with --megatrain" in done.stdout
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["case"] == "ours-streamed" and line["max_grad_norm"] == 1.0 and line["num_layers"] == 2
    assert line["command"].startswith("python benchmarks/step.py --shape tiny") and "--worker" not in line["command"]
    assert line["command"].endswith("--out step.jsonl")  # names of folders stay where they are


def test_kernels_are_changed_on_one_engine_and_told_apart(monkeypatch, tmp_path, capsys):
    out = tmp_path / "k.jsonl"
    words = "--shape tiny --num-layers 2 --batch 2 --seq 16 --steps 1 --device cpu --case ours-streamed".split()
    monkeypatch.setattr(sys, "argv", ["step_kernels.py", *words, "--out", str(out)])
    chosen = []
    monkeypatch.setattr(step_kernels, "_steps", lambda e, *a: chosen.append(decoder_of(e)) or measure_steps(e, *a))
    assert step_kernels.main() == 0
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [name_of(line) for line in lines] == [
        "ours-streamed:eager", "ours-streamed:eager/torch", "ours-streamed:eager",
    ]  # fmt: skip
    assert chosen[0] is chosen[2] and chosen[0] is not chosen[1]
    assert lines[1]["loss"][0] < lines[0]["loss"][0]  # they train on
    capsys.readouterr()
    assert step_kernels.report(out) == 0
    assert [row.split(" | ")[0] for row in capsys.readouterr().out.splitlines()[4:7]] == [
        "| all of ours", "| torch", "| all of ours",
    ]  # fmt: skip


def test_a_sweep_tries_placements_by_hand_beside_the_automatic_one(monkeypatch, tmp_path, capsys):
    words = "--only tiny@6 --batch 2 --seq 16 --steps 2 --device cpu --tile-numel 4096 --manual 2".split()
    out = tmp_path / "s.jsonl"
    monkeypatch.setattr(sys, "argv", ["sweep.py", *words, "--out", str(out)])
    mapped = []
    monkeypatch.setattr(pool.HostPool, "mmap", lambda p, f, n: mapped.append(n) or take(p, f, n))
    assert sweep.main() == 0 and len(mapped) > 3
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [line["case"] for line in lines] == ["auto", "streamed, window 2", "streamed, window 3"]
    assert [line["options"]["window"] for line in lines] == [2, 2, 3] and sift(lines)[1] == []
    capsys.readouterr()
    assert sweep.report(out) == 0 and report(out) == 0
    lines[0] |= {"predicted_step_s": 1.2 * lines[0]["step_s"]["median"], "plan_gib": {"device": 9.9}}
    lines[0]["gpu_peak_gib"], lines[0]["step_s"]["median"] = 10.0, 1.03 * lines[0]["step_s"]["median"]
    told = [(t.value, t.met) for t in sweep.verdicts([lines[0], {**lines[0], "case": "by hand"}])]
    assert told == [
        (pytest.approx(0.165, abs=1e-3), False), (pytest.approx(0.99), False), (pytest.approx(0.99), True), (1.0, True),
    ]  # fmt: skip


take = pool.HostPool.mmap


def test_memory_of_a_pool_is_zero_whoever_had_it_before():
    with pool.HostPool() as held:
        for _ in range(2):
            held.reset(10 * pool.PAGE)
            first, second = (Arena(5000, "a").take(5000, torch.uint8) for _ in range(2))
            assert not first.any() and not second.any() and first.data_ptr() != second.data_ptr()
            assert first.untyped_storage().nbytes() == 5000
            first.fill_(7), second.fill_(9)
        assert Arena(20 * pool.PAGE, "larger than the pool").nbytes == 20 * pool.PAGE


def test_the_product_is_measured_beside_the_engine(monkeypatch, tmp_path, capsys):
    words = "--device cpu --shape tiny --num-layers 2 --batch 2 --seq 16 --steps 2 --tile-numel 4096".split()
    out = tmp_path / "p.jsonl"
    monkeypatch.setattr(sys, "argv", ["product.py", *words, "--case", "ours-streamed:eager", "--out", str(out)])
    assert product.main() == 0
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["tokens_per_second"] == pytest.approx(32 / line["step_s"]["median"], rel=0.01)
    assert line["max_grad_norm"] == 0.0 and line["steps"] == 2 and sift([line])[1] == []
    ratio = line["tokens_per_second"] / line["engine_tokens_per_second"]
    assert f"train's tokens/s over the engine's alone: {ratio:.3f}, at least 0.97" in capsys.readouterr().out
    assert report(out) == 0


def decoder_of(engine):
    return engine.executor._actions["forward"].__self__.decoder


measure_steps = step_kernels._steps


def test_a_case_ends_as_its_process_does_and_not_later_than_it_may():
    assert step.call([sys.executable, "-c", "raise SystemExit(3)"], None) == 3
    assert step.call([sys.executable, "-c", "import time; time.sleep(100)"], 0.1) == 1


def test_a_case_that_nobody_knows_ends_the_call_before_it_starts():
    done = subprocess.run([sys.executable, str(STEP), "--cases", "fsdp3"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 1 and "case is 'fsdp3', must be one of stock-resident" in done.stderr
