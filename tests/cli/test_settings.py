"""From files and command lines to a config: spellings, places, and which source wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slideformer.cli.config_file import load_config
from slideformer.cli.names import ALIASES, CONVERTED
from slideformer.config import TrainConfig
from slideformer.config.spellings import FOREIGN
from slideformer.errors import BadInput

OTHER_SPELLINGS = {
    "model_name_or_path": "base_model model model_path",
    "dataset": "dataset_name datasets local_dataset",
    "dataset_text_field": "text_column field column",
    "max_length": "max_seq_length max_seq_len cutoff_len sequence_len seq_len",
    "packing": "sample_packing neat_packing packed",
    "completion_only_loss": "train_on_completions train_on_inputs train_on_prompt train_on_input",
    "per_device_train_batch_size": "micro_batch_size batch_size",
    "per_device_eval_batch_size": "eval_batch_size batch_size_val",
    "num_train_epochs": "num_epochs epochs",
    "max_steps": "num_steps",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_steps": "lr_warmup_steps num_warmup_steps",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "max_grad_norm": "clip_grad_norm max_norm",
    "bf16": "torch_dtype dtype",
    "attn_implementation": "flash_attn",
    "seed": "random_seed",
    "logging_steps": "log_interval log_every_n_steps",
    "save_steps": "save_interval",
    "val_size": "val_set_size val_split_fraction",
    "eval_strategy": "evaluation_strategy",
    "output_dir": "out_dir",
    "resume_from_checkpoint": "resume",
    "dataloader_num_workers": "num_workers",
    "dataset_num_proc": "preprocessing_num_workers",
    "offload_optimizer": "nvme_offload_fraction",
    "offload_activations": "ac_offload_nvme",
}
"""Our names, and what users of other tools write for them."""
WRITTEN = {  # what is no number of some kind
    **{key: "some/where" for key in ("model_name_or_path", "dataset", "output_dir")},
    **{"dataset_text_field": "body", "packing": "true", "completion_only_loss": "true", "lr_scheduler_type": "linear"},
    **{"attn_implementation": "sdpa", "eval_strategy": "epoch\nval_size: 2", "resume_from_checkpoint": "auto"},
    **{"bf16": "bfloat16", "val_size": "0.5", "adam_beta1": "0.5", "adam_beta2": "0.5", "offload_optimizer": "0.5"},
    "offload_activations": "true",
}
NEGATED = ("train_on_inputs", "train_on_prompt", "train_on_input")

HEAD = "model_name_or_path: model\ndataset: rows.jsonl\n"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., object]:
    def run(text: str, *overrides: str):
        path = tmp_path / "train.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return run


@pytest.fixture
def complaint(load, tmp_path: Path) -> Callable[..., str]:
    """What is said about a file, without its folder."""

    def run(text: str, *overrides: str) -> str:
        with pytest.raises(BadInput) as caught:
            load(text, *overrides)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return run


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lerning_rate: 1e-5", "3: unknown key lerning_rate: did you mean learning_rate?"),
        ("learning_rate: fast", "3: learning_rate: found 'fast', should be a valid number"),
        ("num_workers: -1", "3: dataloader_num_workers: found -1, should be greater than or equal to 0"),
        ("num_workers: some", "3: dataloader_num_workers: found 'some', should be a valid integer"),
        ("output_dir:", "3: output_dir: found nothing, should be a valid string"),
        ("packing: maybe", "3: packing: found 'maybe', should be a valid boolean"),
        ("dataset_num_proc: 0", "3: dataset_num_proc: found 0, should be greater than or equal to 1"),
        ("bf16: maybe", "3: bf16: found 'maybe', should be 'auto' or should be a valid boolean"),
        ("lr: 1\nlearning_rate: 2", "4: lr and learning_rate are both learning_rate (also at train.yaml:3): keep one"),
        ("dataset: more.jsonl", "3: dataset is given twice (also at train.yaml:2): keep one"),
        ("max_gpu_memory: 24", "3: max_gpu_memory: found 24, which is no size: write 24GiB (or MiB, GB, MB)"),
        ("warmup_ratio: 0.1\nwarmup_steps: 3", "3: warmup_ratio and warmup_steps are both given: keep one"),
        ("eval_steps: [", "4: not valid YAML: expected the node content, but found '<stream end>'"),
    ],
)  # fmt: skip
def test_a_bad_line_is_told_in_one_sentence_with_its_place(complaint, line, expected) -> None:
    assert complaint(HEAD + line + "\n") == f"train.yaml:{expected}"


def test_an_unknown_key_that_is_near_nothing_lists_the_known_ones(complaint) -> None:
    text = complaint(HEAD + "zzz: 1\n")
    assert text == f"train.yaml:3: unknown key zzz; known keys: {', '.join(TrainConfig.model_fields)}"
    assert complaint(HEAD + "cutof_len: 1\n").endswith("unknown key cutof_len: did you mean cutoff_len?")


def test_a_missing_key_is_named_with_the_file(complaint) -> None:
    assert complaint("dataset: rows.jsonl\n") == (
        "train.yaml: model_name_or_path is not given, and it has no default: add `model_name_or_path: ...`"
    )
    assert complaint("model: m\ndataset: []\n") == (
        "train.yaml:2: dataset is empty, and it has no default: add `dataset: ...`"
    )


def test_an_unknown_key_of_a_dataset_is_told(complaint) -> None:
    text = "model: m\ndataset:\n  - {path: a, wieght: 2}\n"
    assert complaint(text) == "train.yaml:2: dataset: unknown key wieght: did you mean weight?"
    known = "path, name, split, format, columns, weight"
    assert complaint(text.replace("wieght", "zz")) == f"train.yaml:2: dataset: unknown key zz; known keys: {known}"


def test_files_that_are_no_mapping_are_told(complaint) -> None:
    assert complaint("- a\n") == "train.yaml:1: expected `key: value` lines, found a sequence"
    assert complaint("") == "train.yaml is empty: it needs at least model_name_or_path and dataset"
    with pytest.raises(BadInput, match="there is no config file nowhere.yaml: check the path"):
        load_config(Path("nowhere.yaml"))


def test_yaml_traps(load) -> None:
    config = load(HEAD + "learning_rate: 1e-5\nmax_steps: 1e3\nsave_strategy: no\neval_strategy: no\n").config
    assert (config.learning_rate, config.max_steps) == (1e-5, 1000)
    assert (config.save_strategy, config.eval_strategy) == ("no", "no")


def test_an_alias_is_taken_with_one_notice(load, tmp_path) -> None:
    resolved = load(HEAD + "evaluation_strategy: no\n")
    assert resolved.config.eval_strategy == "no"
    (notice,) = resolved.notices
    assert notice.replace(f"{tmp_path}/", "") == "train.yaml:3: evaluation_strategy is taken as eval_strategy"


@pytest.mark.parametrize("key", ["dataloader_num_workers", "num_workers"])
def test_workers_of_a_loader_are_taken_with_one_notice_that_they_have_no_effect(load, tmp_path, key) -> None:
    resolved = load(HEAD + f"{key}: 4\n")
    assert resolved.config.dataloader_num_workers == 4
    assert [notice.replace(f"{tmp_path}/", "") for notice in resolved.notices] == [
        f"train.yaml:3: {key} has no effect: batches are cut from encoded rows inside the run, and what encodes in "
        "parallel is dataset_num_proc"
    ]
    assert load(HEAD + "dataloader_num_workers: 0\n").notices == ()


OTHER_CONFIGS = {
    "TRL": """\
        learning_rate: 2.0e-5
        num_train_epochs: 1
        packing: true
        per_device_train_batch_size: 2
        gradient_accumulation_steps: 8
        gradient_checkpointing: true
        gradient_checkpointing_kwargs: {use_reentrant: false}
        optim: adamw_torch_fused
        bf16: true
        use_peft: false
        load_in_4bit: false
        eval_strategy: steps
        eval_steps: 100
        val_size: 0.1
        deepspeed: zero3.json
        """,
    "LLaMA-Factory": """\
        trust_remote_code: false
        stage: sft
        do_train: true
        finetuning_type: full
        deepspeed: ds_z3_config.json
        template: llama3
        cutoff_len: 2048
        max_samples: 1000
        preprocessing_num_workers: 16
        dataloader_num_workers: 4
        logging_steps: 10
        save_steps: 500
        plot_loss: true
        overwrite_output_dir: true
        save_only_model: false
        report_to: none
        per_device_train_batch_size: 1
        lr_scheduler_type: cosine
        warmup_ratio: 0.1
        ddp_timeout: 180000000
        resume_from_checkpoint: null
        """,
    "Axolotl": """\
        model_type: AutoModelForCausalLM
        dataset_prepared_path: prepared
        val_set_size: 0.05
        sequence_len: 8192
        sample_packing: true
        eval_sample_packing: false
        pad_to_sequence_len: true
        adapter:
        lora_r:
        wandb_project:
        micro_batch_size: 1
        num_epochs: 3
        optimizer: adamw_torch_fused
        lr_scheduler: cosine
        bf16: auto
        tf32: false
        gradient_checkpointing: true
        flash_attention: true
        weight_decay: 0.0
        fsdp:
        special_tokens:
        plugins: [axolotl.integrations.liger.LigerPlugin]
        liger_rope: true
        """,
}
"""Of full fine-tunes, as their documentation has them, less the model and the data."""


@pytest.mark.parametrize("tool", OTHER_CONFIGS)
def test_a_config_of_another_tool_is_taken_and_what_has_no_effect_is_told(load, tool) -> None:
    lines = [line.strip() for line in OTHER_CONFIGS[tool].strip().splitlines()]
    resolved = load(HEAD + "\n".join(lines) + "\n")
    given = dict(line.split(":", 1) for line in lines)
    told = {notice.split(": ", 1)[1].split()[0] for notice in resolved.notices if "has no effect" in notice}
    asked = {key for key, value in given.items() if value.strip() not in ("", "false", "null")}
    assert told == asked & {*FOREIGN, "dataloader_num_workers"} and len(told) > 3
    ours = [line for line in lines if line.split(":")[0] not in FOREIGN]
    assert load(HEAD + "\n".join(ours) + "\n").config == resolved.config


@pytest.mark.parametrize("key", FOREIGN)
def test_what_only_other_tools_have_is_answered(load, complaint, key) -> None:
    assert key not in TrainConfig.model_fields and key not in ALIASES
    for nothing in ("", "null", "false", "0", "[]", "no"):
        assert load(f"{HEAD}{key}: {nothing}\n").notices == ()
    if FOREIGN[key].takes("something"):
        (notice,) = load(f"{HEAD}{key}: something\n").notices
        assert f"{key} has no effect: {FOREIGN[key].says}" in notice
    else:
        assert complaint(f"{HEAD}{key}: something\n") == f"train.yaml:3: {key}: {FOREIGN[key].says}; leave it out"
    with pytest.raises(BadInput, match=f"^{key}: "):
        TrainConfig(**{key: "something"})


def test_what_a_run_would_not_do_is_refused(complaint, load) -> None:
    said = "train.yaml:3: optim: the optimizer is AdamW with fp32 moments; leave it out"
    assert complaint(HEAD + "optim: paged_adamw_8bit\n") == said
    assert complaint(HEAD + "finetuning_type: lora\n").startswith("train.yaml:3: finetuning_type: all weights")
    assert complaint(HEAD + "fp16: true\n").startswith("train.yaml:3: fp16: it computes in bf16")
    with pytest.raises(BadInput, match="command line: lora_r: all weights are trained"):
        load(HEAD, "lora_r=8")


@pytest.mark.parametrize(("written", "count"), [("0", 1), ("-1", 0), ("null", 0), ("5", 0), ("'0'", 1)])
def test_no_steps_is_told_to_be_no_limit(load, tmp_path, written, count) -> None:
    notices = load(HEAD + f"num_train_epochs: 2\nmax_steps: {written}\n").notices
    text = "train.yaml:4: max_steps: 0 is no limit, so num_train_epochs decides: 2"
    assert [notice.replace(f"{tmp_path}/", "") for notice in notices] == [text] * count


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("train_on_inputs: true", "completion_only_loss", False),
        ("train_on_inputs: false", "completion_only_loss", True),
        ("train_on_completions: true", "completion_only_loss", True),
        ("train_on_inputs: true", "assistant_only_loss", False),
        ("train_on_completions: false", "assistant_only_loss", False),
        ("train_on_inputs: true\nassistant_only_loss: true", "assistant_only_loss", True),
        ("dtype: bfloat16", "bf16", True),
        ("torch_dtype: float32", "bf16", False),
        ("use_liger_kernel: true", "kernels", "liger"),
        ("use_liger_kernel: false", "kernels", "auto"),
        ("cutoff_len: 99", "max_length", 99),
        ("batch_size: 3", "per_device_train_batch_size", 3),
        ("force: true", "ignore_memory_limits", True),
        ("save_interval: 7", "save_steps", 7),
        ("save_interval: 7", "save_strategy", "steps"),
        ("resume: auto", "resume_from_checkpoint", "auto"),
        ("resume: yes", "resume_from_checkpoint", True),
        ("resume: no", "resume_from_checkpoint", False),
    ],
)
def test_aliases_carry_their_meaning(load, line, key, value) -> None:
    assert getattr(load(HEAD + line + "\n").config, key) == value


@pytest.mark.parametrize(
    ("alias", "key"), [(alias, key) for key, aliases in OTHER_SPELLINGS.items() for alias in aliases.split()]
)
def test_every_spelling_of_other_tools_is_taken(load, alias, key) -> None:
    """The value arrives under our name, as it does when it is written there."""
    head = "".join(line for line in HEAD.splitlines(keepends=True) if not line.startswith(f"{key}:"))
    end = "offload_dir: disk\n" if key.startswith("offload_") else ""
    written = WRITTEN.get(key, "3")
    resolved = load(f"{head}{alias}: {written}\n{end}")
    ours = {"bf16": "true", "offload_activations": "nvme", **dict.fromkeys(NEGATED, "false")}
    end += "assistant_only_loss: false\n" if alias in NEGATED else ""
    plain = load(f"{head}{key}: {ours.get(alias, ours.get(key, written))}\n{end}")
    assert getattr(resolved.config, key) == getattr(plain.config, key)
    assert resolved.config == plain.config
    assert any(f": {alias} " in notice for notice in resolved.notices), resolved.notices


def test_every_alias_leads_to_a_key_and_is_none_itself() -> None:
    assert set(ALIASES.values()) <= TrainConfig.model_fields.keys()
    assert not ALIASES.keys() & TrainConfig.model_fields.keys()
    assert CONVERTED.keys() <= ALIASES.keys()


def test_the_command_line_wins_over_the_file_under_any_spelling(load) -> None:
    text = HEAD + "learning_rate: 1e-5\nmax_length: 64\n"
    config = load(text, "--learning-rate", "3e-4", "max_length=32", "--bf16", "--seed=7", "--epochs", "2").config
    assert (config.learning_rate, config.max_length, config.bf16, config.seed) == (3e-4, 32, True, 7)
    assert config.num_train_epochs == 2
    assert load(text, "--learning_rate=2e-4").config.learning_rate == 2e-4
    assert load(text, "lr=2e-4").config.learning_rate == 2e-4


def test_values_on_the_command_line_are_yaml(load) -> None:
    config = load(HEAD, "dataset=[a.jsonl, {path: b.txt, weight: 2}]", "--max_steps", "-1").config
    assert [(spec.path, spec.weight) for spec in config.dataset] == [("a.jsonl", 1.0), ("b.txt", 2.0)]
    assert config.max_steps == -1


def test_bad_words_on_the_command_line_are_told(complaint) -> None:
    assert complaint(HEAD, "fast") == "command line: 'fast' is neither key=value nor --key value"
    assert complaint(HEAD, "--lr=1", "learning_rate=2") == (
        "command line: lr and learning_rate are both learning_rate (also at command line): keep one"
    )
    assert complaint(HEAD, "dataset=[").startswith("command line: the value in 'dataset=[' is not valid YAML")
    assert complaint(HEAD, "seed=-1") == "command line: seed: found -1, should be greater than or equal to 0"
