"""Every system that a CPU can run trains the same model alike, and says truly what it moved and updated."""

from __future__ import annotations

import sys

import pytest

from benchmarks.toys import toy
from cases import MODULES, NotHere, measure, parse_case
from rules import STREAMED_DOWN, STREAMED_UP
from targets import targets

TIGHT = 1e-9
"""A norm so small that clipped gradients come near AdamW's epsilon: then a clipped step is another step."""


@pytest.mark.parametrize("case", ["ours-streamed", "ours-resident", "fsdp2", "stock-resident-bf16"])
@pytest.mark.parametrize("max_grad_norm", [0.0, TIGHT])
def test_a_system_trains_as_the_ceiling_does(measured, case, max_grad_norm):
    changes: dict[str, object] = {"max_grad_norm": max_grad_norm}
    ceiling = measured("stock-resident", **changes)
    if case.startswith("ours") and max_grad_norm:
        changes["update"] = "deferred"
    assert measured(case, **changes)["loss"] == pytest.approx(ceiling["loss"], abs=2e-5)


def test_clipping_changes_what_is_learned(measured):
    free, clipped = (measured("stock-resident", max_grad_norm=norm)["loss"] for norm in (0.0, TIGHT))
    assert abs(free[-1] - clipped[-1]) > 2e-5
    assert measured("stock-fwd-bwd")["loss"][0] == pytest.approx(free[0], abs=1e-6)


@pytest.mark.parametrize("case", ["stock-resident", "stock-resident-bf16", "fsdp2", "ours-streamed", "ours-resident"])
def test_every_parameter_is_updated_once_a_step(line, case):
    found = line(case)
    assert found["params_updated"] == found["params"]


SPILLED = {"micro_batches": 2, "engine": {"saved_on_device": 0}}


@pytest.mark.parametrize("changes", [{}, SPILLED], ids=["whole", "spilled"])
def test_a_streamed_step_moves_the_bytes_of_its_plan(line, changes):
    found = line("ours-streamed", **changes)
    moved, planned, words = found["bytes"], found["plan_bytes"], 64 * found["batch"] * found["seq"]
    for way, least in (("up", STREAMED_UP), ("down", STREAMED_DOWN)):
        assert planned[way] <= moved[way] <= planned[way] + words
        assert moved[way] >= least * found["params"]


@pytest.mark.parametrize(
    "shares", [{"optimizer": 0.5}, {"optimizer": 1.0, "weights": 1.0, "activations": 0.5}], ids=str
)
def test_a_step_on_disk_reads_and_writes_the_bytes_of_its_plan(line, tmp_path, shares):
    found = line("ours-streamed", **SPILLED, offload=shares, offload_dir=str(tmp_path / "disk"))
    read, written = found["disk_bytes"]
    assert [read, written] == found["plan_disk_bytes"]
    assert found["params_updated"] == found["params"], "however many tiles of it take turns in one place"
    least = 8 * shares["optimizer"] * found["params"]
    assert 0.9 * least <= written <= read and found["disk_gib"] > 0
    assert line("ours-streamed")["disk_bytes"] == [0, 0]


def test_whole_blocks_on_disk_keep_the_device_as_it_is_with_more_of_them(line, tmp_path):
    found = line(
        "ours-streamed",
        **{**SPILLED, "engine": {"saved_on_device": 2}, "update": "deferred"},
        offload={"blocks": 0.5, "activations": 1.0},
        offload_dir=str(tmp_path / "disk"),
        plan_layers=12,
    )
    read, written = found["disk_bytes"]
    assert [read, written] == found["plan_disk_bytes"] and found["params_updated"] == found["params"]
    assert isinstance(found["direct"], bool) and found["page_cache_mib"] < 1024
    per_block = 12 * (found["params"] - 512 * 64) / found["num_layers"]
    assert 1.9 * per_block < written < 4 * per_block, "all state of half of the blocks, and saved inputs"
    told = [(target.text, target.met) for target in targets([found]) if "peak of the device" in target.text]
    assert told == [("ours-streamed+disk:deferred, peak of the device over that of the plan with 12 layers", True)] * 2
    with pytest.raises(SystemExit, match="activations is 0.5 beside blocks, must be 0 or 1"):
        line("ours-streamed", offload={"blocks": 0.5, "activations": 0.5}, offload_dir=str(tmp_path / "other"))


def test_a_resident_step_moves_the_batch_and_the_loss(line):
    found = line("ours-resident")
    assert found["plan_bytes"] == {"up": 0, "down": 0}
    assert max(found["bytes"].values()) <= 64 * found["batch"] * found["seq"]


def test_a_step_in_micro_batches_has_the_loss_of_the_whole(measured):
    whole, parts = measured("stock-resident"), measured("stock-resident", micro_batches=2)
    assert parts["loss"] == pytest.approx(whole["loss"], abs=2e-5)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("trainstream", "trainstream is not installed: pip install trainstream"),
        ("deepspeed-zero3", "deepspeed is not installed: pip install deepspeed"),
        ("megatrain", "no checkout of MegaTrain: give its folder with --megatrain"),
    ],
)
def test_what_is_not_here_says_so(monkeypatch, case, reason):
    for name in ("trainstream", "deepspeed"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotHere) as caught:
        measure(toy(case))
    assert str(caught.value) == reason


def test_an_option_that_the_engine_does_not_know_is_named():
    with pytest.raises(SystemExit, match="--engine: no option rings; there are .*ring"):
        measure(toy("ours-streamed", engine={"rings": 4}))


def test_case_names():
    name = parse_case("ours-auto-24.5:deferred")
    assert (name.case, name.gpu_limit_gib, name.update, name.clips) == ("ours-auto", 24.5, "deferred", True)
    assert parse_case("ours-streamed").update == "eager"
    assert parse_case("fsdp2:clip").clips and not parse_case("fsdp2").clips
    assert parse_case("ours-streamed:deferred=1e9").max_grad_norm == 1e9 and name.max_grad_norm is None
    assert parse_case("fsdp2:clip=0.5").clips
    wrong_norms = ("ours-streamed:eager=1", "fsdp2:clip=", "fsdp2:clip=0", "fsdp2:clip=nan", "ours-streamed:deferred=x")
    for wrong in (*wrong_norms, "ours-streamed:clip", "fsdp2:eager", "stock-fwd-bwd:clip", "fsdp3", "ours-auto-"):
        with pytest.raises(SystemExit, match="case is"):
            parse_case(wrong)
    assert set(MODULES) >= {"stock-resident", "ours-streamed", "fsdp2", "deepspeed-zero2", "trainstream", "megatrain"}
