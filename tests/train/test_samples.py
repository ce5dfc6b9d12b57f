"""Samples during training: the text of the weights of that step, and training as if there were none."""

from __future__ import annotations

import io
import json
import shutil
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slideformer.engine.generation import Generation
from slideformer.engine.generator import GenerationOptions
from slideformer.errors import BadInput
from slideformer.model.sampling import Sampling
from slideformer.train.console import PlainConsole
from slideformer.train.generate import GenerateRequest, open_generator
from slideformer.train.samples import lines_of_steps
from slideformer.train.stop import Stopped
from slideformer.train.trainer import Trainer, train
from train.test_trainer import read_metrics

PROMPTS = ("3+4", "a longer prompt than that")
FIELDS = {"max_steps": 4, "generate_steps": 3, "generate_prompts": PROMPTS, "generate_max_new_tokens": 5}
WEIGHTS = "model.safetensors"


def run(config) -> str:
    out = io.StringIO()
    train(config, PlainConsole(out))
    return out.getvalue()


def generations(config) -> list[dict]:
    return [json.loads(line) for line in Path(config.output_dir, "generations.jsonl").read_text().splitlines()]


def test_samples_come_at_their_steps_and_at_the_end_and_are_those_of_the_weights(config_for) -> None:
    config = config_for(**FIELDS, learning_rate=0.05, report_to=["tensorboard", "trackio"])
    out = run(config)
    lines = generations(config)
    assert [(line["global_step"], line["prompt"]) for line in lines] == [(s, p) for s in (3, 4) for p in PROMPTS]
    assert all(line["num_tokens"] == 5 or line["finish_reason"] == "stop" for line in lines)
    request = GenerateRequest(Path(config.output_dir), GenerationOptions(cpu_threads=1), device="cpu")
    with open_generator(request, PROMPTS, 5) as generator:
        last, _ = generator.run(Sampling(max_new_tokens=5, end_ids=generator.codec.end_ids))
    assert [line["text"] for line in lines[2:]] == [one.text for one in last]
    assert "sample 1 after step 3: 3+4\n" in out and "sample 2 after step 4: a longer prompt than that\n" in out
    assert "gets nothing more" not in out
    events = EventAccumulator(f"{config.output_dir}/tensorboard")
    events.Reload()
    shown = events.Tensors("samples/1/text_summary")
    assert [event.step for event in shown] == [3, 4]
    assert lines[0]["text"].encode() in shown[0].tensor_proto.string_val[0]


def test_training_is_bit_equal_with_and_without(config_for, tmp_path) -> None:
    """With micro-batches, an odd window and every second step generating."""
    found = []
    for fields in ({}, {**FIELDS, "generate_steps": 2}):
        steps = {"max_steps": 5, "window": 3, "gradient_accumulation_steps": 2, "output_dir": str(tmp_path / "out")}
        config = config_for(**{**fields, **steps})
        run(config)
        metrics = [(line["loss"], line["grad_norm"]) for line in read_metrics(config)]
        found.append((metrics, Path(config.output_dir, WEIGHTS).read_bytes()))
        shutil.rmtree(config.output_dir)
    assert found[0] == found[1]
    assert len(found[0][0]) == 5


def test_a_run_that_goes_on_keeps_the_samples_up_to_its_checkpoint(config_for) -> None:
    fields = {**FIELDS, "generate_steps": 1, "save_steps": 2}
    config = config_for(**fields)
    run(config)
    whole = generations(config)
    shutil.rmtree(f"{config.output_dir}/checkpoint-4")
    with Path(config.output_dir, "generations.jsonl").open("a") as file:
        file.write('{"global_step": 9')  # torn
    run(config_for(**fields, resume_from_checkpoint=True))
    assert generations(config) == whole
    for folder in Path(config.output_dir).glob("checkpoint-*"):
        shutil.rmtree(folder)
    run(config_for(max_steps=1))
    assert not Path(config.output_dir, "generations.jsonl").exists()
    assert lines_of_steps(Path(config.output_dir, "generations.jsonl"), 5) == ""


def test_prompts_may_come_from_a_file(config_for, tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text("3+4\n5+6\n")
    config = config_for(**{**FIELDS, "generate_prompts": str(tmp_path / "prompts.txt"), "max_steps": 1})
    run(config)
    assert [line["prompt"] for line in generations(config)] == ["3+4", "5+6"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"generate_prompts": ["x" * 60]}, r"prompt 1 of generate_prompts has \d+ tokens, and max_length is 48"),
        ({"generate_prompts": "nowhere.txt"}, "there is no file nowhere.txt: give one with a prompt a line, or a list"),
    ],
)
def test_prompts_that_cannot_be_are_refused_before_anything_is_loaded(config_for, fields, text) -> None:
    with pytest.raises(BadInput, match=text):
        run(config_for(**{**FIELDS, **fields}))


def test_a_cpu_has_no_mfu(config_for) -> None:
    config = config_for(max_steps=1)
    run(config)
    assert "mfu" not in read_metrics(config)[0] and read_metrics(config)[0]["tflops"] > 0


def test_a_trainer_generates_before_and_after_training(config_for) -> None:
    config = config_for(max_steps=3, learning_rate=0.05)
    sampling = Sampling(max_new_tokens=5)
    with Trainer(args=config, console=PlainConsole(io.StringIO())) as trainer:
        before = trainer.generate(["3+4", [{"role": "user", "content": "3+4"}]], sampling)
        assert before[0].tokens == before[1].tokens and 1 <= len(before[0].tokens) <= 5
        trainer.train()
        after = trainer.generate(["3+4"], sampling)
    request = GenerateRequest(Path(config.output_dir), GenerationOptions(cpu_threads=1), device="cpu")
    with open_generator(request, ["3+4"], 5) as generator:
        saved, _ = generator.run(Sampling(max_new_tokens=5, end_ids=generator.codec.end_ids))
    assert after[0].tokens == saved[0].tokens != before[0].tokens


def test_what_samples_take_is_in_the_plan_of_the_memory(config_for) -> None:
    with Trainer(args=config_for(**FIELDS), console=PlainConsole(io.StringIO())) as trainer:
        trainer.train()
        assert trainer._engine.budget.host["samples"] > 0
        assert trainer._engine.budget.device["samples"] > 0


def test_a_signal_among_the_samples_ends_the_run_with_a_checkpoint_that_goes_on(config_for, monkeypatch) -> None:
    fields = {**FIELDS, "generate_steps": 2, "generate_max_new_tokens": 30, "save_steps": 4}
    config = config_for(**fields)
    run(config)
    whole = Path(config.output_dir, WEIGHTS).read_bytes()
    shutil.rmtree(config.output_dir)
    run_passes, passes = Generation.run, []

    def signalled(self, prompts, sampling, told):
        def then_told(taken) -> None:
            passes.append(taken)
            if len(passes) == 1:
                signal.raise_signal(signal.SIGTERM)
            told(taken)

        return run_passes(self, prompts, sampling, then_told)

    with monkeypatch.context() as patch:
        patch.setattr(Generation, "run", signalled)
        with pytest.raises(Stopped, match="SIGTERM in the samples after step 2: go on from checkpoint-2") as stopped:
            run(config)
    assert stopped.value.signum == signal.SIGTERM and len(passes) == 1
    run(config_for(**fields, resume_from_checkpoint=True))
    assert Path(config.output_dir, WEIGHTS).read_bytes() == whole
    assert [line["global_step"] for line in generations(config)] == [4, 4]
