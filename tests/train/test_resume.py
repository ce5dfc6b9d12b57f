"""A run that was stopped and goes on ends as one that never stopped: same rows, same bits, same metrics."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch

from slideformer.data import Batches, load_dataset, load_tokenizer
from slideformer.errors import BadInput
from slideformer.train import trainer
from slideformer.train.console import PlainConsole
from slideformer.train.schedule import learning_rate
from slideformer.train.trainer import train
from train.toy import make_config, make_model, write_sums

TIMES = ("tokens_per_second", "step_time", "eta_seconds", "tflops", "mfu")
OF_THE_MACHINE = (*TIMES, "host_mem_gib", "pinned_gib", "gpu_mem_peak_gib")


class Killed(BaseException):
    """Ends a run where it is, as a kill does: nothing is saved after it."""


def run(config) -> str:
    """What was told."""
    out = io.StringIO()
    train(config, PlainConsole(out))
    return out.getvalue()


def metrics_of(config) -> list[dict]:
    """Of metrics.jsonl, all that does not depend on the clock or the machine."""
    lines = Path(config.output_dir, "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    return [{k: v for k, v in m.items() if k not in OF_THE_MACHINE and not k.startswith("busy_")} for m in metrics]


def state_of(config, step: int) -> dict[str, bytes]:
    """The files of a checkpoint's state."""
    return files_of(Path(config.output_dir) / f"checkpoint-{step}")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(autouse=True)
def _no_parity_check(monkeypatch) -> None:
    """Half the time of a run this short; tests/model has it."""
    monkeypatch.setattr(trainer, "check_parity", lambda *args, **settings: None)


@pytest.fixture
def kill_after(monkeypatch):
    """Kill the run when the result of step `number` has been read."""
    finish = trainer.Loop._finish

    def arrange(number: int, with_what=None) -> None:
        def dying_finish(self, step):
            finish(self, step)
            if step.number == number:
                if with_what is None:
                    raise Killed
                os.kill(os.getpid(), with_what)

        monkeypatch.setattr(trainer.Loop, "_finish", dying_finish)

    yield arrange


@pytest.fixture
def rows_seen(monkeypatch) -> list[tuple[str, ...]]:
    """Rows of every step submitted."""
    seen = []
    submit = trainer.Loop._submit

    def noting_submit(self, index, waiting):
        submitted = submit(self, index, waiting)
        seen.append((submitted.number, submitted.batch.rows))
        return submitted

    monkeypatch.setattr(trainer.Loop, "_submit", noting_submit)
    return seen


FIVE = {"max_steps": 5, "save_steps": 2, "save_total_limit": None}


@pytest.fixture(scope="module")
def stopped_run(model_folder, tmp_path_factory) -> Path:
    """The output_dir of a run of FIVE, with checkpoints 2, 4 and 5. Not to be written to."""
    folder = tmp_path_factory.mktemp("stopped")
    rows = write_sums(folder / "rows.jsonl", 24)
    run(make_config(model_folder, rows, folder / "out", **FIVE))
    return folder / "out"


# 24 rows in steps of 2 x 3 = 6 rows: four steps an epoch, so 6 is mid-epoch and 4 and 8 are ends of one.
WHOLE = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_steps": 10,
    "weight_decay": 0.1,
    "save_total_limit": None,
}


@pytest.mark.parametrize(
    ("stops", "fields"),
    [(6, {}), (8, {"max_grad_norm": 0}), (6, {"bf16": True, "freeze": r"layers\.1\."})],
    ids=["mid-epoch", "end of an epoch, eager", "bf16, a block frozen"],
)
def test_ten_steps_equal_some_and_the_rest_after_a_kill(
    config_for, tmp_path, kill_after, rows_seen, monkeypatch, stops, fields
) -> None:
    fields = {**WHOLE, "save_steps": 2, **fields}
    straight = config_for(output_dir=str(tmp_path / "straight"), **fields)
    run(straight)
    rows = dict(rows_seen)
    rows_seen.clear()
    broken = config_for(resume_from_checkpoint="auto", **fields)
    kill_after(stops + 1)  # one step after the checkpoint: it is lost and done again
    with pytest.raises(Killed):
        run(broken)
    kill_after(-1)
    assert f"going on from {broken.output_dir}/checkpoint-{stops}" in run(broken)
    assert len(rows) == 10
    assert {number for number, _ in rows_seen} == set(range(1, 11))
    assert all(rows[number] == seen for number, seen in rows_seen)
    assert state_of(broken, 10) == state_of(straight, 10)
    assert len(state_of(broken, 10)) == 6  # table, four blocks, final norm
    assert metrics_of(broken) == metrics_of(straight)
    assert [m["learning_rate"] for m in metrics_of(broken)] == [learning_rate(broken, k, 10) for k in range(10)]
    weights = [Path(c.output_dir, "model.safetensors").read_bytes() for c in (broken, straight)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "other",
    [
        {"window": 1},
        {"window": 4, "tile_numel": 1000},
        {"tile_numel": 10**6, "ring": 7},
        {"cpu_threads": 2, "grad_slots": 1},
        {"offload_activations": "cpu", "update_ahead": "none"},
    ],
    ids=str,
)
def test_other_sizes_of_the_machinery_go_on_bit_for_bit(config_for, stopped_run, other) -> None:
    again = config_for(**FIVE, **other, resume_from_checkpoint=str(stopped_run / "checkpoint-2"))
    run(again)
    assert state_of(again, 5) == files_of(stopped_run / "checkpoint-5")


@pytest.mark.parametrize(
    ("other", "told_of"),
    [
        ({"kernels": "torch"}, ""),
        ({"attn_implementation": "sdpa"}, ""),
        ({"attn_implementation": "eager"}, "sdpa and is"),
        ({"full_determinism": True}, "full_determinism was False and is now True"),
    ],
    ids=str,
)
def test_what_is_told_of_the_last_bits_is_what_runs_and_not_how_it_is_written(
    config_for, stopped_run, other, told_of
) -> None:
    told = run(config_for(**FIVE, **other, resume_from_checkpoint=str(stopped_run / "checkpoint-2")))
    assert ("last bits" in told) == bool(told_of) and told_of in told


def test_another_number_of_torchs_threads_is_told_on_a_cpu(config_for, stopped_run) -> None:
    torch.set_num_threads(2)
    try:
        told = run(config_for(**FIVE, resume_from_checkpoint=str(stopped_run / "checkpoint-2")))
    finally:
        torch.set_num_threads(1)
    assert "warning: the last bits may differ from an unbroken run's: threads of torch was 1 and is now 2\n" in told


def test_another_split_into_micro_batches_goes_on_with_the_same_rows(config_for, stopped_run, rows_seen) -> None:
    asked = {"resume_from_checkpoint": str(stopped_run / "checkpoint-2")}
    told = run(config_for(**FIVE, **asked, per_device_train_batch_size=1, gradient_accumulation_steps=4))
    assert "warning: the last bits may differ from an unbroken run's: per_device_train_batch_size was 4 and is" in told
    run(config_for(**FIVE, **asked))
    split, whole = rows_seen[:3], rows_seen[3:]
    assert [(number, sorted(rows)) for number, rows in split] == [(n, sorted(rows)) for n, rows in whole]


def test_a_line_of_several_steps_counts_those_before_the_checkpoint(config_for, tmp_path, kill_after) -> None:
    fields = {"max_steps": 6, "save_steps": 2, "logging_steps": 3}
    straight = config_for(output_dir=str(tmp_path / "straight"), **fields)
    run(straight)
    kill_after(3)
    with pytest.raises(Killed):
        run(config_for(**fields))
    kill_after(-1)
    again = config_for(**fields, resume_from_checkpoint="auto")
    run(again)
    assert metrics_of(again) == metrics_of(straight)


def test_steps_that_were_skipped_stay_out_of_adams_count(config_for, tmp_path, kill_after) -> None:
    fields = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e38, "lr_scheduler_type": "constant"}
    fields |= {"max_grad_norm": 0, "on_nonfinite": "skip"}
    straight = config_for(output_dir=str(tmp_path / "straight"), **fields)
    run(straight)
    kill_after(3)
    with pytest.raises(Killed):
        run(config_for(**fields))
    kill_after(-1)
    again = config_for(**fields, resume_from_checkpoint="auto")
    run(again)
    record = json.loads((tmp_path / "out/checkpoint-4/trainer.json").read_text())["progress"]
    assert (record["step"], record["num_updates"], record["nonfinite_steps"]) == (4, 1, 3)
    assert metrics_of(again) == metrics_of(straight)


# what does not belong together


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"learning_rate": 2e-3}, "learning_rate was 0.001 and is now 0.002"),
        ({"weight_decay": 0.5}, "weight_decay was 0.0 and is now 0.5"),
        ({"max_grad_norm": 2.0}, "max_grad_norm was 1.0 and is now 2.0"),
        ({"max_steps": 9}, r"steps of the run \(max_steps, num_train_epochs\) was 5 and is now 9"),
        ({"warmup_steps": 3}, "steps of warm-up was 1 and is now 3"),
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type was cosine and is now linear"),
        ({"seed": 7}, "data_seed was 42 and is now 7"),
        ({"bf16": True}, r"precision \(bf16\) was float32 and is now bfloat16"),
        ({"freeze": "embed"}, r"trained parameters \(freeze\) was .* in 38 tensors .* and is now .* in 37 tensors"),
        ({"gradient_accumulation_steps": 2}, "per_device_train_batch_size x gradient_accumulation_steps was 4 and"),
        ({"assistant_only_loss": False}, r"dataset\[0\] was 24 samples of weight 1 \(\w+\) and is now"),
        ({"val_size": 2}, r"dataset\[0\] was 24 samples .* and is now 22 samples"),
    ],
    ids=str,
)
def test_what_changes_the_maths_is_refused_by_name(config_for, stopped_run, other, expected) -> None:
    fields = {**FIVE, "resume_from_checkpoint": str(stopped_run / "checkpoint-2")}
    with pytest.raises(BadInput, match=f"checkpoint-2 cannot be continued with this config: .*{expected}"):
        run(config_for(**{**fields, **other}))


def test_another_model_is_refused_by_what_differs(config_for, tmp_path, stopped_run) -> None:
    asked = {**FIVE, "resume_from_checkpoint": str(stopped_run / "checkpoint-2")}
    other = make_model(tmp_path / "other", rms_norm_eps=1e-5)
    with pytest.raises(BadInput, match=r"config.json: rms_norm_eps was 1e-06 and is now 1e-05; change it back"):
        run(config_for(model=other, **asked))


def test_a_constant_rate_may_go_on_for_longer(config_for, tmp_path) -> None:
    fields = {"lr_scheduler_type": "constant", "save_steps": 2}
    run(config_for(max_steps=4, **fields))
    straight = config_for(output_dir=str(tmp_path / "straight"), max_steps=6, **fields)
    run(straight)
    longer = config_for(max_steps=6, resume_from_checkpoint="auto", **fields)
    run(longer)
    assert state_of(longer, 6) == state_of(straight, 6)


def test_a_step_follows_from_the_samples_the_seed_and_its_number_alone(stopped_run, config_for) -> None:
    """Why the step is all of the data's position."""
    config = config_for()
    codec = load_tokenizer(config.model_name_or_path)
    sources = load_dataset(config, codec).train
    one, other = (Batches(sources, 4, 1, 42, codec.pad_id) for _ in range(2))
    forward = [one.step(k).rows for k in range(12)]
    assert [other.step(k).rows for k in reversed(range(12))] == forward[::-1]
