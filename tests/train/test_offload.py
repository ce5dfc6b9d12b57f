"""A run whose state and saved inputs lie on disk is the same run, to the bit: metrics, model, checkpoints."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slideformer.errors import BadInput, DoesNotFit, RunFailed
from slideformer.memory import DiskFolder, size
from slideformer.train import trainer
from slideformer.train.console import PlainConsole
from slideformer.train.disk_use import filled_nbytes, written_before
from slideformer.train.loop import Loop
from slideformer.train.only import dry_run
from slideformer.train.plan import plan_run
from slideformer.train.setup import require_gds
from slideformer.train.trainer import train
from train.toy import write_sums

TIMES = ("tokens_per_second", "step_time", "eta_seconds", "host_mem_gib", "pinned_gib", "tflops", "mfu", "eval_runtime")
NVME = {"offload_optimizer": "nvme", "offload_weights": "nvme", "offload_activations": "nvme"}
HALF = {"offload_optimizer": 0.5, "offload_weights": 0.5, "offload_activations": 0.5}
RUN = {"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.fixture(autouse=True)
def _no_parity_check(monkeypatch) -> None:
    """Half the time of a run this short; tests/model has it."""
    monkeypatch.setattr(trainer, "check_parity", lambda *args, **settings: None)


def run(config) -> str:
    out = io.StringIO()
    train(config, PlainConsole(out))
    return out.getvalue()


def lines_of(config) -> list[dict]:
    return [json.loads(line) for line in Path(config.output_dir, "metrics.jsonl").read_text().splitlines()]


def metrics_of(config) -> list[dict]:
    """All that does not depend on the clock, the machine, or where things lie."""
    clocks = ("busy_", "nvme_")
    return [{k: v for k, v in line.items() if k not in TIMES and not k.startswith(clocks)} for line in lines_of(config)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("program", [{}, {"max_grad_norm": 0}], ids=["deferred", "eager"])
@pytest.mark.parametrize("where", [NVME, HALF, {"max_host_memory": "2.5MiB"}], ids=["nvme", "half", "auto"])
def test_metrics_evaluations_samples_and_the_model_are_those_of_a_run_in_memory(
    config_for, tmp_path, where, program
) -> None:
    held_out = write_sums(tmp_path / "held-out.jsonl", 5, seed=7)
    beside = {"eval_dataset": str(held_out), "eval_steps": 2, "generate_steps": 2, "generate_prompts": ["1+1"]}
    every = {**RUN, **beside, **program, "generate_max_new_tokens": 3, "save_steps": 2}
    memory = config_for(output_dir=str(tmp_path / "memory"), **every)
    disk = config_for(output_dir=str(tmp_path / "disk"), offload_dir=str(tmp_path / "tier"), **every, **where)
    run(memory)
    run(disk)
    assert metrics_of(disk) == metrics_of(memory) and len(metrics_of(disk)) >= 6
    for step in (2, 4):
        assert files_of(tmp_path / "disk" / f"checkpoint-{step}") == files_of(
            tmp_path / "memory" / f"checkpoint-{step}"
        )
    assert files_of(tmp_path / "disk") == files_of(tmp_path / "memory") != {}
    samples = [(tmp_path / where / "generations.jsonl").read_text() for where in ("disk", "memory")]
    assert samples[0] == samples[1] != ""
    logged = [line for line in lines_of(disk) if "step_time" in line]
    for key, most in (("nvme_read_gbps", 100), ("nvme_write_gbps", 100), ("busy_disk_pct", 100.1)):
        found = [line[key] for line in logged]  # a deferred step is told of before its updates are done
        assert min(found) >= 0 and 0 < found[-1] <= most, key
    assert not any("nvme_read_gbps" in line for line in lines_of(memory))
    assert not (tmp_path / "tier").exists()


@pytest.mark.parametrize(("before", "after"), [({}, NVME), (NVME, {}), (HALF, NVME)], ids=["onto", "off", "more"])
def test_a_run_goes_on_wherever_its_state_lies_now(config_for, tmp_path, before, after) -> None:
    def config(output: str, **fields: object):
        on_disk = {"offload_dir": str(tmp_path / "tier")} if "offload_weights" in fields else {}
        return config_for(output_dir=str(tmp_path / output), save_steps=2, **{**RUN, **on_disk, **fields})

    whole = config("whole")
    run(whole)
    run(config("moved", max_steps=2, lr_scheduler_type="constant", **before))
    run(config("straight", lr_scheduler_type="constant"))
    run(config("moved", resume_from_checkpoint="auto", lr_scheduler_type="constant", **after))
    assert files_of(tmp_path / "moved" / "checkpoint-4") == files_of(tmp_path / "straight" / "checkpoint-4") != {}


def test_a_run_that_would_pass_max_disk_writes_stops_with_a_checkpoint_and_goes_on_with_a_larger_limit(
    config_for, tmp_path
) -> None:
    every = {**RUN, **NVME, "offload_dir": str(tmp_path / "tier"), "save_steps": 100}
    a_step = plan_run(config_for(**every)).traffic[1]
    with pytest.raises(RunFailed) as told:
        run(config_for(**every, max_disk_writes=4 * a_step))
    assert str(told.value).startswith(("after step 2 of 4: ", "after step 3 of 4: "))
    assert "were written to offload_dir, and further steps would pass max_disk_writes (" in str(told.value)
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert f"after step {saved.name.removeprefix('checkpoint-')} " in str(told.value)
    assert not (tmp_path / "tier").exists()
    run(config_for(**every, resume_from_checkpoint="auto"))
    whole = config_for(output_dir=str(tmp_path / "whole"), **RUN)
    run(whole)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_max_disk_writes_counts_what_earlier_starts_of_the_run_have_written(config_for, tmp_path, monkeypatch) -> None:
    """Also what was written after the last checkpoint."""
    written: list[int] = []
    close = DiskFolder.close

    def noted(self: DiskFolder, **how: bool) -> None:
        close(self, **how)
        written.append(self.writes.nbytes)

    monkeypatch.setattr(DiskFolder, "close", noted)
    every = {**RUN, **NVME, "offload_dir": str(tmp_path / "tier"), "save_steps": 2, "resume_from_checkpoint": "auto"}
    limit = 4 * plan_run(config_for(**every)).traffic[1]
    with pytest.raises(
        RunFailed, match="after step [23] of 4: .* written to offload_dir, and further steps would pass"
    ):
        run(config_for(**every, max_disk_writes=limit))
    assert sum(written) <= limit
    too_little = r"filling offload_dir and 2 steps write \S+ MiB, after \S+ MiB by earlier starts of this run, and max_"
    with pytest.raises(
        BadInput, match=too_little + r"disk_writes is \S+ MiB: set a larger limit, or keep more in host"
    ):
        run(config_for(**every, max_disk_writes=limit))
    assert len(written) == 2 and written[1] == 0, "before anything is loaded"
    with pytest.raises(
        BadInput, match=r"^earlier starts of this run have written \S+ MiB to offload_dir, and max_disk"
    ):
        run(config_for(**every, max_disk_writes=sum(written)))
    out = run(config_for(**every, max_disk_writes=10 * limit))
    assert re.search(r"on disk in \S+: .* steps write \S+ TB, after \S+ TB by earlier starts", out)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["disk_writes"] == sum(written)
    assert lines_of(config_for())[-1]["nvme_written_gb"] <= sum(written) / 1e9
    anew = {**every, "resume_from_checkpoint": False, "output_dir": str(tmp_path / "anew"), "max_steps": 1}
    run(config_for(**anew))
    assert json.loads((tmp_path / "anew" / "run.json").read_text())["disk_writes"] == written[-1]


def test_what_a_killed_run_has_logged_counts_and_only_where_it_is_gone_on_with(config_for, tmp_path) -> None:
    config = config_for(offload_dir="tier", resume_from_checkpoint="auto")
    assert written_before(config, 0) == 0
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text('{"disk_writes": 2000}')
    assert written_before(config, 1000) == 2000 and written_before(config, 3000) == 3000
    (out / "metrics.jsonl").write_text('{"loss": 1}\n{"nvme_written_gb": 4.5e-6}\n{"nvme_written_gb": 0.0')
    assert written_before(config, 3000) == 4500
    assert written_before(config_for(offload_dir="tier"), 3000) == 0


def test_a_run_says_at_its_start_what_lies_on_disk_and_what_it_will_write(config_for, tmp_path) -> None:
    config = config_for(**RUN, **NVME, offload_dir=str(tmp_path / "tier"))
    found = plan_run(config)
    (told,) = (line for line in run(config).splitlines() if line.startswith("on disk in "))
    read, written = (nbytes / 1e9 for nbytes in found.traffic)
    assert told.startswith(f"on disk in {tmp_path}/tier: {size(found.budget.disk_nbytes)} (")
    assert all(f"{term} {size(nbytes)}" in told for term, nbytes in found.budget.disk.items())
    moved = f"a step reads {read:.3g} GB and writes {written:.3g} GB, 4 steps write {4 * written / 1e3:.3g} TB"
    assert told.endswith(f"); {moved}")
    assert "on disk in" not in run(config_for(output_dir=str(tmp_path / "memory"), **RUN))


def test_a_limit_that_the_first_steps_would_reach_refuses_the_run_before_it_writes(config_for, tmp_path, monkeypatch):
    """A run, a dry run and a plan; what filling takes is what it was said to take, at least."""
    tier = tmp_path / "tier"
    config = config_for(**RUN, **NVME, offload_dir=str(tier), max_disk_writes=2**20)
    assert re.match(
        r"BadInput: filling offload_dir and 2 steps write \S+ MiB, and max_disk_writes is 1", refusals(config)
    )
    with pytest.raises(BadInput, match=re.escape(refusals(config).removeprefix("BadInput: "))):
        run(config)
    assert not tier.exists()
    found, filled = plan_run(config), []
    monkeypatch.setattr(Loop, "run", lambda loop: filled.append(loop.work.engine.disk_traffic[1]))
    options = found.options.step_options(found.decoder.layout, found.decoder.dtype)
    told = filled_nbytes(found.decoder.layout, options, found.decoder.dtype, goes_on=False)
    enough = config.model_copy(update={"max_disk_writes": told + 2 * found.traffic[1]})
    dry_run(enough, PlainConsole(io.StringIO())).plan.require_fit()
    run(enough)
    assert filled == [pytest.approx(told, rel=0.15)], "a tile in which parameters meet is written for each"


@pytest.mark.parametrize(
    ("status", "checkpoints", "before"),
    [("finished", None, 0), ("failed", None, 2000), ("running", None, 2000), ("finished", 0, 2000)],
)
def test_what_another_run_in_the_folder_has_written_does_not_count(config_for, tmp_path, status, checkpoints, before):
    config = config_for(offload_dir="tier", resume_from_checkpoint="auto", max_disk_writes="1MB")
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text(json.dumps({"status": status, "disk_writes": 2000}))
    (out / "metrics.jsonl").write_text('{"nvme_written_gb": 1e-6}\n')
    assert written_before(config, checkpoints) == before


def test_a_new_run_where_one_has_finished_without_checkpoints_starts_its_count_anew(config_for, tmp_path) -> None:
    every = {**RUN, **NVME, "offload_dir": str(tmp_path / "tier"), "max_steps": 1}
    run(config_for(**every))
    first = json.loads((tmp_path / "out" / "run.json").read_text())["disk_writes"]
    run(config_for(**every, save_steps=1, resume_from_checkpoint="auto"))
    assert json.loads((tmp_path / "out" / "run.json").read_text())["disk_writes"] == first > 0


def test_plan_and_dry_run_say_what_lies_on_disk_and_what_a_step_moves(config_for, tmp_path) -> None:
    config = config_for(**RUN, **NVME, offload_dir=str(tmp_path / "tier"), disk_tbw=1e-3)
    found = plan_run(config)
    text = found.text()
    assert {"first moments", "second moments", "residuals", "weights", "saved inputs"} <= set(found.budget.disk)
    assert "\ndisk  " in text and "a step reads" in text and "of the 0.001 TB that the disk is rated for" in text
    assert found.as_dict()["disk_writes"] == 4 * found.traffic[1] > 0
    again = dry_run(config, PlainConsole(io.StringIO())).plan.text()
    assert re.sub(r"[\d,]+ GiB are free", "", again) == re.sub(r"[\d,]+ GiB are free", "", text)
    assert not (tmp_path / "tier").exists()


FROM_SHM = Path("/dev/shm") / f"slideformer-tests-{os.getpid()}"


def test_a_plan_looks_at_the_disk_that_is_here_and_leaves_nothing_there(config_for, tmp_path) -> None:
    found = plan_run(config_for(**RUN, **NVME, offload_dir=str(tmp_path / "tier")))
    with DiskFolder(tmp_path / "real") as folder:
        assert found.look.direct is folder.direct
    assert found.look.nbytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.01)
    assert re.search(r"\n[\d,]+ GiB are free at offload_dir", found.text())
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}
    found = plan_run(config_for(**RUN, **NVME, offload_dir=str(FROM_SHM)))
    assert found.look.direct is False and "no direct I/O" in found.text() and not FROM_SHM.exists()
    assert plan_run(config_for(**RUN, offload_dir=str(tmp_path / "tier"))).look is None, "nothing would lie there"


def refusals(config, *, here: bool = True) -> str:
    """What a dry run says, and a plan too if the disk is here."""
    with pytest.raises((BadInput, DoesNotFit)) as told:
        dry_run(config, PlainConsole(io.StringIO()))
    found = plan_run(config, elsewhere=True)
    if here:
        with pytest.raises(type(told.value), match=re.escape(str(told.value))):
            found.require_fit()
    else:
        found.require_fit()
    return f"{told.type.__name__}: {told.value}"


def test_plan_and_dry_run_refuse_what_a_run_would(config_for, tmp_path, monkeypatch) -> None:
    tier = tmp_path / "tier"
    config = config_for(**RUN, **NVME, offload_dir=str(tier))
    away = config_for(**RUN, **NVME, offload_dir=str(tmp_path / "not" / "mounted"))
    assert refusals(away, here=False).startswith(
        f"BadInput: offload_dir {tmp_path}/not/mounted cannot be made, there is"
    )
    assert "is not on this machine: its room is not known" in " ".join(plan_run(away).text().split())
    with DiskFolder(tier) as folder:
        folder.file("weight", [1 << 20])
        assert refusals(config).startswith(f"BadInput: offload_dir {tier} is used by a run that is at work")
        left = [*tier.iterdir()]
    assert len(left) == 2
    if (child := os.fork()) == 0:
        DiskFolder(tier).file("weight", [1 << 20])
        os._exit(0)
    os.waitpid(child, 0)
    assert "of a run that was killed" in refusals(config)
    again = config_for(**RUN, **NVME, offload_dir=str(tier), reuse_offload_dir=True)
    free, usual = os.statvfs(tmp_path), os.statvfs
    dry_run(again, PlainConsole(io.StringIO())).plan.require_fit()
    assert sorted(path.name for path in tier.iterdir()) == ["slideformer.lock", "weight"], "only a run removes it"
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=free.f_frsize))
    found = plan_run(again)
    assert found.look.nbytes >= free.f_frsize + (1 << 20), "what a run would remove first counts as free"
    needs = found.budget.disk_nbytes / 2**30
    assert refusals(again).startswith(
        f"DoesNotFit: {tier} needs {needs:.2f} GiB and 0.00 GiB are free there: free some"
    )
    monkeypatch.setattr(os, "statvfs", usual)
    shutil.rmtree(tier)
    tier.write_text("")
    assert refusals(config) == f"BadInput: offload_dir {tier} is a file: choose a folder that is not there yet"


def test_a_disk_that_would_be_mounted_at_the_root_is_judged_by_a_dry_run_and_not_by_a_plan(
    config_for, tmp_path, monkeypatch
) -> None:
    """The root's file system says nothing of another machine's disk."""
    mount = f"/slideformer-not-there-{os.getpid()}"
    full = SimpleNamespace(f_bavail=1, f_frsize=os.statvfs(tmp_path).f_frsize)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    config = config_for(**RUN, **NVME, offload_dir=mount)
    refused = r"GiB and 0\.00 GiB are free there|cannot be made"  # the second: not by root
    assert re.search(refused, refusals(config, here=False))
    assert f"0 GiB are free in /, where offload_dir {mount} would be made" in " ".join(plan_run(config).text().split())
    assert re.search(refused, refusals(config_for(**RUN, **NVME, offload_dir=str(tmp_path / "tier"))))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1])
def test_a_share_of_the_saved_inputs_goes_to_disk_on_the_cpu_too(config_for, tmp_path, share) -> None:
    every = {**RUN, "gradient_accumulation_steps": 8, "offload_dir": str(tmp_path / "tier")}
    found = plan_run(config_for(**every, offload_activations=share))
    saved_nbytes = 4096 + 2 * 48 * 64 * 4  # with its header
    num_saved = (4 + 1) * 8  # inputs of blocks, and a gradient; what comes back soonest may be in the ring of 4 still
    on_disk = found.budget.disk.get("saved inputs", 0) / saved_nbytes
    assert share * num_saved - 5 <= on_disk <= share * num_saved + 1


def test_gds_without_kvikio_is_refused_before_the_data_is_read(config_for, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    config = config_for(use_gds=True, offload_dir="tier", dataset="not-there.jsonl")
    with pytest.raises(BadInput, match=r"^GPUDirect Storage needs kvikio \(.*\): pip install 'slideformer\[gds\]'"):
        require_gds(config, "cuda")
    require_gds(config, "cuda", elsewhere=True)
    with pytest.raises(BadInput, match="use_gds is true, but the device is the CPU"):
        run(config)


def test_a_folder_that_another_run_uses_is_refused_before_anything_is_read_or_written(config_for, tmp_path) -> None:
    with DiskFolder(tmp_path / "tier"):
        for found in ({}, {"dataset": "not-there.jsonl"}):
            with pytest.raises(BadInput, match="tier is used by a run that is at work"):
                run(config_for(**RUN, **NVME, **found, offload_dir=str(tmp_path / "tier")))
        assert [path.name for path in (tmp_path / "tier").iterdir()] == ["slideformer.lock"]
