"""What other tools call our settings, and settings of theirs that there will never be.

The command line takes the former. In Python they are pointed at: there an unknown keyword is a mistake.
"""

from __future__ import annotations

from typing import NamedTuple

ALIASES: dict[str, str] = {
    "base_model": "model_name_or_path",
    "model": "model_name_or_path",
    "model_path": "model_name_or_path",
    "dataset_name": "dataset",
    "datasets": "dataset",
    "local_dataset": "dataset",
    "text_column": "dataset_text_field",
    "field": "dataset_text_field",
    "column": "dataset_text_field",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "seq_len": "max_length",
    "sample_packing": "packing",
    "neat_packing": "packing",
    "packed": "packing",
    "preprocessing_num_workers": "dataset_num_proc",
    "num_proc": "dataset_num_proc",
    "num_workers": "dataloader_num_workers",
    "max_train_samples": "max_samples",
    "buffer_size": "shuffle_buffer_size",
    "tokenized_path": "dataset_cache_dir",
    "dataset_prepared_path": "dataset_cache_dir",
    "train_on_completions": "completion_only_loss",
    "train_on_inputs": "completion_only_loss",
    "train_on_prompt": "completion_only_loss",
    "train_on_input": "completion_only_loss",
    "micro_batch_size": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "batch_size_val": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "num_steps": "max_steps",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "lr_warmup_steps": "warmup_steps",
    "num_warmup_steps": "warmup_steps",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "clip_grad_norm": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "torch_dtype": "bf16",
    "dtype": "bf16",
    "flash_attn": "attn_implementation",
    "use_liger_kernel": "kernels",
    "random_seed": "seed",
    "log_interval": "logging_steps",
    "log_every_n_steps": "logging_steps",
    "val_set_size": "val_size",
    "val_split_fraction": "val_size",
    "evaluation_strategy": "eval_strategy",
    "save_interval": "save_steps",
    "resume": "resume_from_checkpoint",
    "out_dir": "output_dir",
    "force": "ignore_memory_limits",
    "nvme_offload_fraction": "offload_optimizer",
    "nvme_path": "offload_dir",
    "ac_offload_nvme": "offload_activations",
}


class Foreign(NamedTuple):
    """A setting of other tools that there is not here. says: what is so instead. harmless: values with which a run is
    what they ask for, or so nearly that a notice will do; ANY: all of them."""

    says: str
    harmless: tuple[str, ...] = ()

    def asks_for_nothing(self, value: object) -> bool:
        return not value or str(value).lower() in NOTHING

    def takes(self, value: object) -> bool:
        return self.harmless is ANY or str(value).lower() in self.harmless


ANY = ("any value",)
NOTHING = ("false", "none", "null", "no", "off", "0", "0.0")


def _alike(says: str, keys: str, harmless: tuple[str, ...] = ()) -> dict[str, Foreign]:
    return dict.fromkeys(keys.split(), Foreign(says, harmless))


FOREIGN: dict[str, Foreign] = {
    **_alike(
        "a token does not belong in a config, which is kept beside the result: log in, or set HF_TOKEN", "hub_token"
    ),
    **_alike(
        "code that comes with a model is never run; model classes that transformers has are trained",
        "trust_remote_code",
    ),
    **_alike(
        "all weights are trained, there are no adapters",
        "adapter adapter_name_or_path additional_target lora_alpha lora_dropout lora_model_dir lora_r lora_rank "
        "lora_target lora_target_linear lora_target_modules peft_config use_lora use_peft",
    ),
    **_alike("all weights are trained, there are no adapters", "finetuning_type", ("full",)),
    **_alike(
        "weights are trained as they are, not quantized",
        "load_in_4bit load_in_8bit quantization_bit quantization_method",
    ),
    **_alike(
        "the optimizer is AdamW with fp32 moments",
        "optim optimizer",
        ("adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused"),
    ),
    **_alike("it computes in bf16, or with bf16: false in float32", "fp16"),
    **_alike("torch's own setting decides how it multiplies float32", "tf32", ANY),
    **_alike("the loss is the cross entropy of texts or conversations", "stage", ("sft", "pt")),
    **_alike("the loss is the cross entropy of texts or conversations", "label_smoothing_factor pref_loss rl"),
    **_alike("nothing is added to the embeddings", "neftune_noise_alpha"),
    **_alike("the tokens are those of the model's tokenizer", "added_tokens special_tokens tokenizer_name_or_path"),
    **_alike("dataset takes the paths themselves", "dataset_dir"),
    **_alike("eval_steps says how often, or eval_strategy: epoch", "evals_per_epoch"),
    **_alike("save_steps says how often, or save_strategy: epoch", "saves_per_epoch"),
    **_alike(
        "a block is run again in backward unless what it keeps has room on the GPU",
        "activation_offloading gradient_checkpointing gradient_checkpointing_kwargs",
        ANY,
    ),
    **_alike(
        "what has no room on the GPU is kept off it anyway, see placement and offload_optimizer",
        "accelerator_config deepspeed fsdp fsdp_config fsdp_version",
        ANY,
    ),
    **_alike("one GPU is used", "ddp ddp_backend ddp_find_unused_parameters ddp_timeout local_rank", ANY),
    **_alike(
        "kernels says what runs on the GPU",
        "liger_fused_linear_cross_entropy liger_glu_activation liger_rms_norm liger_rope plugins torch_compile",
        ANY,
    ),
    **_alike(
        "attn_implementation says how attention is computed",
        "eager_attention flash_attention sdp_attention xformers_attention",
        ANY,
    ),
    **_alike(
        "rows are padded to the longest of their micro-batch, and packing: true leaves little of that",
        "eval_packing eval_sample_packing group_by_length pad_to_sequence_len padding_free",
        ANY,
    ),
    **_alike("the tokenizer's own chat template is used, or the file that chat_template names", "template", ANY),
    **_alike("the model's folder says what it is", "model_type tokenizer_type", ANY),
    **_alike(
        "batches are cut from encoded rows inside the run",
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor",
        ANY,
    ),
    **_alike("columns that are not used are left alone", "remove_unused_columns", ANY),
    **_alike("they are always counted", "include_num_input_tokens_seen include_tokens_per_second", ANY),
    **_alike("slideformer train trains, and evaluates what eval_dataset or val_size names", "do_eval do_train", ANY),
    **_alike("what another run has left in output_dir is not written over", "overwrite_output_dir", ANY),
    **_alike("a checkpoint has all that a run goes on from", "save_only_model", ANY),
    **_alike("models are written as safetensors", "save_safetensors", ANY),
    **_alike("slideformer report draws a run's curves", "plot_loss", ANY),
    **_alike(
        "report_to: wandb logs to the project in WANDB_PROJECT, as run_name",
        "use_wandb wandb_entity wandb_log_model wandb_name wandb_project wandb_run_id wandb_watch",
        ANY,
    ),
}
