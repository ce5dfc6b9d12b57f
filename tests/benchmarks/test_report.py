"""The report prints what adds up, and says in a sentence what does not."""

from __future__ import annotations

import copy
import json

import pytest

from flops import model_flops
from report import report, sift, table
from rules import name_of
from shapes import shape
from targets import targets


@pytest.fixture
def call(line):
    """Three lines of one call."""
    lines = [line(case) for case in ("stock-fwd-bwd", "stock-resident", "ours-streamed")]
    return copy.deepcopy(lines)


def test_what_was_measured_adds_up_and_is_printed(call, tmp_path, capsys):
    path = tmp_path / "step.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in call))
    assert report(path) == 0
    printed = capsys.readouterr().out
    assert "tiny, 4 x 16 tokens" in printed
    for case in ("stock-fwd-bwd", "stock-resident", "ours-streamed:eager"):
        assert f"\n{case} " in printed
    assert table(call, markdown=True).count("\n| ") == 4


DISK = {"bench": "disk", "ratio": 0.95}
RATES = [{**DISK, "case": f"loop-{kind}", "gbps": gbps} for kind, gbps in (("read", 2.0), ("write", 1.0), ("mix", 1.5))]
SLOW = "over the longer of its disk's time and the step without a disk"


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"direct": False}, ["direct I/O"]),
        ({"page_cache_mib": 1100.0}, ["MiB by which the page cache grew"]),
        # 3 GB both ways at 1.5 GB/s and 2 GB more to read at 2 GB/s are 3 s
        ({"step_s": {"median": 3.5}}, ["over the longest of its lanes (disk, 3 s)", SLOW]),
        ({"step_s": {"median": 3.4}}, [SLOW]),
        ({"step_s": {"median": 6.0}, "busy": {"compute": 0.9, "disk": 1.0}}, [SLOW]),
    ],
    ids=str,
)
def test_a_step_on_disk_is_held_to_the_slowest_of_disk_host_and_gpu(changes, missed):
    line = {**large("ours-streamed", 2.5), "update": "eager", "predicted_step_s": None, "host_before_gib": None}
    line |= {"options": {"saved_on_device": 8}}
    on_disk = {"disk_gib": 4.0, "disk_bytes": [3.5e9, 1.5e9], "direct": True, "page_cache_mib": 0.0}
    on_disk |= {"step_s": {"median": 3.2}, "busy": {"compute": 0.7, "disk": 1.0}}
    name = "ours-streamed+disk:eager"
    told = [t for t in targets([*RATES, line, {**line, **on_disk, **changes}]) if name in t.text]
    assert len(told) == 4
    long = {**DISK, "case": "loop-mix-long", "gbps": 1.0}  # what it gives for longer: 3 GB take a second more
    (slowest,) = (t for t in targets([*RATES, long, {**line, **on_disk}]) if f"{name} over the longest" in t.text)
    assert "(disk, 4 s)" in slowest.text
    assert [t.text.removeprefix(name).lstrip(", ") for t in told if not t.met] == missed


def test_the_store_is_held_to_nine_tenths_of_a_plain_loop():
    lines = [{**DISK, "case": "store-mix", "gbps": 1.4}, {**DISK, "case": "store-read", "gbps": 1.4, "ratio": 0.89}]
    assert [(t.text[-4:], t.met) for t in targets(lines)] == [("read", False), (" mix", True)]


def double(line: dict, key: str) -> None:
    line[key] *= 2


WRONG = {
    "has no busy": lambda x: x.pop("busy"),
    "bench is 'stop', must be one of step, optimizer, link, kernels, sweep, product, disk": lambda x: x.update(
        bench="stop"
    ),
    "times are not in order": lambda x: x["step_s"].update(min=2 * x["step_s"]["max"]),
    "tokens/s are not 64 tokens": lambda x: double(x, "tokens_per_second"),
    "TFLOP/s are not what the shape asks for": lambda x: double(x, "tflops"),
    "lanes are busy for more than the step": lambda x: x["busy"].update(update=1.5),
    "a loss is not finite": lambda x: x["loss"].append(float("nan")),
    "parameters were updated in a step, the model has 180800": lambda x: x.update(params_updated=180799),
    "None parameters were updated": lambda x: x.update(params_updated=None),
    "its bytes were not measured": lambda x: x.update(bytes=None),
    "bytes went up, the plan has": lambda x: x["bytes"].update(up=x["bytes"]["up"] * 1.01),
    "bytes went down, the plan has": lambda x: x["bytes"].update(down=x["bytes"]["down"] * 0.99),
    "bytes were read from disk and written, the plan has [0, 0]": lambda x: x.update(disk_bytes=[0, 4096]),
    "2.90 bytes a parameter went up; streamed, at least 3 do": lambda x: [
        x[key].update(up=2.9 * x["params"]) for key in ("bytes", "plan_bytes")
    ],
    "1.90 bytes a parameter went down; streamed, at least 2 do": lambda x: [
        x[key].update(down=1.9 * x["params"]) for key in ("bytes", "plan_bytes")
    ],
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_line_that_does_not_add_up_is_rejected_with_the_sentence(call, sentence, tmp_path, capsys):
    WRONG[sentence](call[-1])
    path = tmp_path / "step.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in call))
    assert report(path) == 1
    captured = capsys.readouterr()
    assert sentence in captured.err and "does not add up: run a-run ours-streamed: " in captured.err
    assert "ours-streamed:eager" not in captured.out


def test_a_table_of_which_rows_cross_the_link_counts_for_nothing(call):
    line = call[-1]
    line["untied_table_params"] = 10_000
    for way, each in (("up", 3.0), ("down", 2.0)):
        line["bytes"][way] = line["plan_bytes"][way] = each * (line["params"] - 10_000)
    assert sift(call)[1] == []
    line["untied_table_params"] = 9_000
    assert len(sift(call)[1]) == 2


def large(case: str, median: float, **changes: object) -> dict:
    """A line of the 3B shape at batch 32, as if it had taken so long."""
    config, tokens = shape("llama-3.2-3b"), 32 * 1024
    keys = (
        "run commit date command gpu torch cpu_threads update gpu_limit_gib pinned_gib predicted_step_s bytes".split()
    )
    line = dict.fromkeys([*keys, "plan_bytes", "params_updated"])
    line |= {"bench": "step", "case": case, "shape": "llama-3.2-3b", "batch": 32, "seq": 1024, "max_grad_norm": 0.0}
    line |= {"steps": 6, "step_s": dict.fromkeys(("min", "median", "max"), median), "busy": {}, "loss": [12.0, 12.0]}
    line |= {"tokens_per_second": tokens / median, "tflops": model_flops(config, 32, 1024) / median / 1e12}
    line |= {"gpu_peak_gib": 12.0, "host_peak_gib": 40.0, "params": 3_212_749_824}
    return line | changes


def faults(*lines: dict) -> list[str]:
    return sift(list(lines))[1]


def test_a_call_in_which_a_peer_or_the_ceiling_is_slower_than_it_was_is_void():
    base = large("stock-fwd-bwd", 1.36)
    assert faults(base, large("fsdp2", 2.514), large("stock-resident", 1.40), large("trainstream", 3.30)) == []
    assert faults(base, large("fsdp2", 2.514 * 1.06)) == [
        "is void: fsdp2 took 1.959 x stock forward and backward, 1.849 is known of it; measure again"
    ]
    assert "is void: stock-resident took" in faults(base, large("stock-resident", 1.379 * 1.06))[0]
    assert "is void: trainstream took 2.456 x" in faults(base, large("trainstream", 3.34))[0]
    assert faults(base, large("trainstream", 3.34, max_grad_norm=1.0)) == []  # clipping has a figure of its own
    assert "is void: trainstream:clip" in faults(base, large("trainstream", 3.51, max_grad_norm=1.0))[0]
    assert faults(large("fsdp2", 2.514)) == ["has fsdp2 and no stock-fwd-bwd to judge it by"]


def test_losses_that_leave_the_ceilings_are_rejected(call):
    call[-1]["loss"][-1] += 0.01
    (fault,) = faults(*call)
    assert fault.startswith("ours-streamed:eager: its losses are up to 0.01 from stock-resident's, allowed are 0.004")


def test_a_file_without_results_is_an_input_that_is_wrong(tmp_path, capsys):
    assert report(tmp_path / "none.jsonl") == 2
    assert "has no results" in capsys.readouterr().err


def test_targets_are_ratios_within_the_call():
    rate = {"bench": "optimizer", "case": "ours", "gparam_per_s": 4.0, "gbps": 104.0, "stream_gbps": 110.0}
    ours = {"host_before_gib": 1.0, "options": {"saved_on_device": None}, "max_grad_norm": 0.0}
    lines = [
        rate,
        large("stock-fwd-bwd", 1.36, forward_s=0.35),
        large("stock-resident", 1.40),
        large("fsdp2", 2.5),
        large("fsdp2", 2.6, max_grad_norm=1.0),
        large("ours-streamed", 1.43, update="eager", predicted_step_s=1.3, **ours),
        large("ours-streamed", 1.90, update="deferred", **(ours | {"max_grad_norm": 1.0})),
    ]
    found = {target.text: target for target in targets(lines)}
    assert found["ours-streamed:eager over stock-fwd-bwd"].value == pytest.approx(1.43 / 1.36)
    assert found["ours-streamed:eager over stock-fwd-bwd"].met
    assert found["fsdp2 over ours-streamed:eager"].value == pytest.approx(2.5 / 1.43)
    assert not found["fsdp2 over ours-streamed:eager"].met
    assert found["fsdp2:clip over ours-streamed:deferred"].met is False
    bound = 1.36 - 0.35 + 3_212_749_824 / 4e9
    joint = found["ours-streamed:deferred over T_backward + max(T_forward, update)"]
    assert joint.value == pytest.approx(1.90 / bound) and joint.met
    predicted = found["ours-streamed:eager, predicted step off by"]
    assert predicted.value == pytest.approx(1 - 1.3 / 1.43) and predicted.met
    host = found["ours-streamed:eager, host GiB over 12 B a parameter + 1 GiB"]
    assert host.value == pytest.approx(39.0 / (12 * 3_212_749_824 / 2**30 + 1)) and not host.met
    assert "MISSED" in str(host) and "at most 1" in str(host)


def test_what_changes_in_a_long_run_is_told():
    steady = {"slots": [5, 5], "pinned": [7, 7], "rss_mib": [100, 117], "segments": [3, 4], "reserved": [9, 9]}
    steady["device_used"] = [24 * 2**30, int(24.6 * 2**30)]
    more = {"update": "eager", "gpu_limit_gib": 24.0, "context_gib": 0.5, "host_before_gib": 1.0, "steps": 48}
    more["options"] = {"saved_on_device": None}
    line = large("ours-streamed", 1.4, steady=steady, **more)
    found = [
        (target.value, target.met) for target in targets([line]) if "change" in target.text or "GPU" in target.text
    ]
    assert found == [(0, True), (0, True), (1, False), (0, True), (17, False), (pytest.approx(24.1 / 24), False)]
    short = [target.text for target in targets([line | {"steps": 6}])]
    assert not [text for text in short if "change" in text]


def test_bytes_are_planned_and_not_fewer_than_measured():
    plan = {"device": 11.9, "host_state": 40.0, "host_buffers": 1.0}
    ours = {"update": "eager", "host_before_gib": 1.0, "options": {"saved_on_device": None}, "plan_gib": plan}
    line = large("ours-streamed", 1.4, **ours)
    found = [(target.value, target.met) for target in targets([line]) if "planned bytes" in target.text]
    device, host = pytest.approx(11.9 / 12), pytest.approx(41 / 39)
    assert found == [(device, False), (device, True), (host, True), (host, False)]


def test_large_models_are_held_against_what_binds_them():
    rate = {"bench": "optimizer", "case": "ours", "gparam_per_s": 4.0, "gbps": 104.0, "stream_gbps": 128.0}
    ours = {"update": "eager", "host_before_gib": 1.0, "options": {"saved_on_device": None}}
    for gpu_s, bound_s in ((1.5, 2.0), (2.4, 2.4)):
        lines = [rate, large("stock-fwd-bwd", gpu_s), large("ours-streamed", 2.4, params=8e9, **ours)]
        for line in lines[1:]:
            line |= {"shape": "llama-3.1-8b", "batch": 16}
        (found,) = [target for target in targets(lines) if "the longer of" in target.text]
        assert found.value == pytest.approx(2.4 / bound_s) and found.met == (bound_s == 2.4)


def test_streaming_may_cost_a_twentieth_of_the_ceilings_rate():
    ours = {"update": "eager", "host_before_gib": 1.0, "options": {"saved_on_device": None}}
    for seconds, met in ((1.05, True), (1.06, False)):
        lines = [large("stock-resident", 1.0), large("ours-streamed", seconds, **ours)]
        for line in lines:
            line |= {"batch": 8, "seq": 4096}
        (found,) = [target for target in targets(lines) if target.text == "ours-streamed:eager over stock-resident"]
        assert found.met is met


def test_a_clipped_step_is_held_against_its_own_lanes():
    parts = {"forward": 0.4, "backward": 1.0, "update": 0.6}
    ours = {"update": "deferred", "host_before_gib": None, "options": {"saved_on_device": None}, "parts_s": parts}
    eager = large("ours-streamed", 1.6, **(ours | {"update": "eager"}))
    lines = [eager, *(large("ours-streamed", 1.6 * s, **ours, max_grad_norm=n) for n, s in ((1.0, 1.06), (1e9, 1.02)))]
    assert name_of(lines[2]) == "ours-streamed:deferred=1e+09"
    found = {target.text: (target.value, target.met) for target in targets(lines)}
    for name, ratio, met in (("ours-streamed:deferred", 1.06, False), ("ours-streamed:deferred=1e+09", 1.02, True)):
        assert found[f"{name} over T_backward + max(T_forward, update)"] == (pytest.approx(ratio), met)
        assert found[f"{name} over ours-streamed:eager"] == (pytest.approx(ratio), met)
    for line in lines:
        line["parts_s"] = None
    assert not [text for text in found if "host GiB" in text]  # the engine was not the first of its process
    assert not [target for target in targets(lines) if "T_backward" in target.text]


def test_bytes_beside_updates_are_held_against_the_stream_loop():
    rate = {"bench": "optimizer", "case": "ours", "gparam_per_s": 4.0, "gbps": 104.0, "stream_gbps": 110.0}
    line = large("ours-streamed", 0.9, update="eager", host_before_gib=None, options={}, dram_gbps=98.0, batch=4)
    (found,) = [target for target in targets([rate, line]) if "bytes a second" in target.text]
    assert found.value == pytest.approx(98 / 110) and not found.met
