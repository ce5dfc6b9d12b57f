"""Trainer from Python: what it can be given, and that it does what the command line does."""

from __future__ import annotations

import io
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slideformer.config import TrainConfig
from slideformer.errors import BadInput, RunFailed
from slideformer.train.console import PlainConsole
from slideformer.train.trainer import Trainer
from train.test_trainer import read_metrics
from train.toy import make_config, write_sums


@pytest.fixture
def trainer_for(tmp_path: Path):
    """A Trainer that is closed when the test ends; the config is `fields` alone, on the CPU."""
    made = []

    def make(*given, fields=None, **named) -> Trainer:
        settings = {
            "device": "cpu",
            "cpu_threads": 1,
            "max_length": 48,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "tile_numel": 4096,
            "output_dir": str(tmp_path / "out"),
            **(fields or {}),
        }
        made.append(Trainer(*given, args=TrainConfig(**settings), console=PlainConsole(io.StringIO()), **named))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def sums(count: int, seed: int = 0) -> list[dict]:
    chance = random.Random(seed)
    pairs = [(chance.randrange(50), chance.randrange(50)) for _ in range(count)]
    return [
        {"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in pairs
    ]


def timeless(lines: list[dict]) -> list[dict]:
    """Without what depends on the clock and the machine."""
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "global_step", "nonfinite_steps")
    return [{k: v for k, v in line.items() if k in kept or k.startswith(("eval_", "num_"))} for line in lines]


def test_rows_and_a_folder_do_what_files_do(trainer_for, config_for, tmp_path, model_folder) -> None:
    held = write_sums(tmp_path / "held.jsonl", 5, seed=3)
    config = config_for(max_steps=4, eval_dataset=str(held), eval_steps=2)
    with Trainer(args=config, console=PlainConsole(io.StringIO())) as trainer:
        from_files = trainer.train()
    lines = timeless(read_metrics(config))
    given = trainer_for(
        str(model_folder),
        train_dataset=sums(24),
        eval_dataset=sums(5, seed=3),
        fields={"max_steps": 4, "eval_steps": 2, "eval_strategy": "steps", "output_dir": str(tmp_path / "rows")},
    )
    result = given.train()
    assert timeless(given.state.log_history) == lines
    assert result.training_loss == from_files.training_loss
    assert result.global_step == 4
    assert result.metrics["eval_loss"] == lines[-1]["eval_loss"]
    record = json.loads((tmp_path / "rows/run.json").read_text())
    assert record["config"]["dataset"][0]["path"] == "(rows given in Python)"
    assert [report["rows_kept"] for report in record["data"]] == [24, 5]


def test_a_module_is_read_and_given_its_trained_weights(trainer_for, config_for, tmp_path, model_folder) -> None:
    config = config_for(max_steps=3)
    with Trainer(args=config, console=PlainConsole(io.StringIO())) as trainer:
        trainer.train()
    module = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    fields = {"max_steps": 3, "output_dir": str(tmp_path / "module")}
    given = trainer_for(module, train_dataset=sums(24), processing_class=tokenizer, fields=fields)
    given.train()
    assert timeless(given.state.log_history) == timeless(read_metrics(config))
    expected = AutoModelForCausalLM.from_pretrained(config.output_dir).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "module").state_dict()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
        torch.testing.assert_close(saved[name], expected[name], rtol=0, atol=0, msg=name)
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        reloaded = AutoModelForCausalLM.from_pretrained(config.output_dir).eval()
        assert torch.equal(reloaded(ids).logits, module.eval()(ids).logits)
    again = AutoTokenizer.from_pretrained(tmp_path / "module")
    assert again.chat_template == tokenizer.chat_template


def test_rows_of_token_ids_are_taken_as_they_are(trainer_for, model_folder) -> None:
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [9, 10, 11]}] * 4
    trainer = trainer_for(
        str(model_folder), train_dataset=rows, fields={"max_steps": 1, "per_device_train_batch_size": 8}
    )
    trainer.train()
    (line,) = trainer.state.log_history
    assert (line["num_input_tokens_seen"], line["num_target_tokens_seen"]) == (28, 16)


def test_evaluating_before_and_after_and_by_name(trainer_for, model_folder, tmp_path) -> None:
    files = {"a": str(write_sums(tmp_path / "a.jsonl", 4, seed=1)), "b": sums(3, seed=2)}
    trainer = trainer_for(
        str(model_folder), train_dataset=sums(24), eval_dataset=files, fields={"max_steps": 3, "eval_on_start": True}
    )
    before = trainer.evaluate()
    assert set(before) == {"eval_a_loss", "eval_a_perplexity", "eval_b_loss", "eval_b_perplexity"}
    trainer.train()
    first, last = [line for line in trainer.state.log_history[1:] if "eval_a_loss" in line]
    assert {k: first[k] for k in before} == before
    after = trainer.evaluate()
    assert {k: last[k] for k in after} == after
    assert after["eval_a_loss"] < before["eval_a_loss"]
    folder = trainer.save_model(tmp_path / "elsewhere")
    AutoModelForCausalLM.from_pretrained(folder)


def test_resuming_is_asked_for_as_in_transformers(trainer_for, model_folder, tmp_path) -> None:
    def losses(steps: int, resume: bool | str | None) -> list[float]:
        fields = {"max_steps": steps, "save_steps": 2, "lr_scheduler_type": "constant"}
        trainer = trainer_for(str(model_folder), train_dataset=sums(24), fields=fields)
        trainer.train(resume_from_checkpoint=resume)
        trainer.close()
        return [line["loss"] for line in trainer.state.log_history]

    whole = losses(4, None)
    (tmp_path / "out").rename(tmp_path / "whole")
    assert losses(2, None) + losses(4, True) == whole


def test_what_cannot_be_used_is_told_with_the_way_out(trainer_for, model_folder, tmp_path) -> None:
    rows = sums(8)
    with pytest.raises(BadInput, match="there is no model: give a folder or a module"):
        trainer_for(train_dataset=rows)
    for args in ({"output_dir": "out"}, {}):
        with pytest.raises(BadInput, match="args is of type dict, must be a TrainConfig"):
            Trainer(str(model_folder), args, train_dataset=rows)
    with pytest.raises(BadInput, match="there is nothing to train on: give train_dataset"):
        trainer_for(str(model_folder))
    with pytest.raises(BadInput, match="val_size takes rows out of files"):
        trainer_for(str(model_folder), train_dataset=rows, fields={"val_size": 2})
    with pytest.raises(BadInput, match="eval_strategy is epoch, but there is no"):
        trainer_for(str(model_folder), train_dataset=rows, fields={"eval_strategy": "epoch"}).train()
    with pytest.raises(BadInput, match="there is nothing to evaluate: give eval_dataset"):
        trainer_for(str(model_folder), train_dataset=rows).evaluate()
    with pytest.raises(BadInput, match="its tokenizer is not known: give it as processing_class"):
        trainer_for(AutoModelForCausalLM.from_pretrained(model_folder), train_dataset=rows).train()
    with pytest.raises(BadInput, match="has no length: give a list of rows"):
        trainer_for(str(model_folder), train_dataset=iter(rows)).train()
    with pytest.raises(BadInput, match="no row of train_dataset can be used, of 1: .*no assistant message"):
        only_asked = [{"messages": [{"role": "user", "content": "hi"}]}]
        trainer_for(str(model_folder), train_dataset=only_asked).train()
    with pytest.raises(RunFailed, match="there are no weights to save: train or evaluate first"):
        trainer_for(str(model_folder), train_dataset=rows).save_model()
    trained = trainer_for(str(model_folder), train_dataset=rows, fields={"max_steps": 1})
    trained.train()
    with pytest.raises(RunFailed, match="has trained already: make another one"):
        trained.train()
    trained.close()
    with pytest.raises(RunFailed, match="this Trainer is closed"):
        trained.evaluate()


def test_a_trainer_that_failed_is_closed(trainer_for, model_folder) -> None:
    class Broken:
        def on_step_end(self, *given, **named) -> None:
            raise ZeroDivisionError

    trainer = trainer_for(str(model_folder), train_dataset=sums(8), callbacks=[Broken()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    with pytest.raises(RunFailed, match="closed"):
        trainer.evaluate()


def test_a_trainer_works_in_a_thread_that_gets_no_signals(trainer_for, model_folder) -> None:
    trainer = trainer_for(str(model_folder), train_dataset=sums(8), fields={"max_steps": 2})
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(trainer.train).result().global_step == 2


def test_loss_png_is_drawn_beside_the_metrics(config_for) -> None:
    config = config_for(max_steps=2, val_size=2)
    with Trainer(args=config, console=PlainConsole(io.StringIO())) as trainer:
        trainer.train()
    picture = Path(config.output_dir, "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_a_run_without_matplotlib_ends_as_any_other_without_a_picture(config_for, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as Python marks what cannot be imported
    config, out = config_for(max_steps=2), io.StringIO()
    with Trainer(args=config, console=PlainConsole(out)) as trainer:
        trainer.train()
    assert "could not be drawn" not in out.getvalue()
    assert not Path(config.output_dir, "loss.png").exists()
    assert Path(config.output_dir, "model.safetensors").exists()


def test_the_config_given_is_left_as_it_was(trainer_for, model_folder, tmp_path) -> None:
    config = make_config(model_folder, write_sums(tmp_path / "rows.jsonl", 8), tmp_path / "out", max_steps=1)
    trainer = Trainer(args=config, train_dataset=sums(4))
    assert config.dataset[0].path == str(tmp_path / "rows.jsonl")
    assert trainer.args.dataset[0].path != config.dataset[0].path
    assert trainer.args.max_steps == 1
