"""Toy models that are Llama with one thing done otherwise, to see that each is noticed. Their model type is "odd"."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from families import FAMILIES


class OddConfig(LlamaConfig):
    model_type = "odd"
    oddity: str = ""


@dataclass(frozen=True)
class Odd:
    """refusal: the sentence of Decoder. parity: where the parity check finds a difference, if Decoder accepts it."""

    refusal: str = ""
    parity: str = ""


ODD = {
    "": Odd(),
    "dropout": Odd(),
    "float32": Odd(),
    "tuple": Odd(),
    "extra": Odd(
        "odd has parameters that are neither in the embedding, nor before the blocks, in them, in the final norm or in "
        "the output projection (second_head.bias, second_head.weight); they would not be trained: choose another model."
    ),
    "shared": Odd(
        "odd shares a parameter between model.layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight; only "
        "the output projection may share one, with the input embedding: choose another model."
    ),
    "persistent": Odd(
        "odd stores buffers in its checkpoints (model.layers.0.mlp.running, model.layers.1.mlp.running, "
        "model.layers.2.mlp.running and 1 more), which would be neither loaded nor saved; only parameters may be "
        "stored: choose another model."
    ),
    "unfilled": Odd(
        "odd does not initialise its buffer model.layers.0.mlp.table, so its value is unknown here; buffers must come "
        "from the model's own _init_weights: choose another model."
    ),
    "attribute": Odd(
        "odd keeps a tensor in the plain attribute model.layers.0.mlp.table, which has no value here; tensors must be "
        "parameters or buffers: choose another model."
    ),
    "no_list": Odd(
        "odd has no lists of 4 blocks (num_hidden_layers); exactly one is needed, with every block in it once: choose "
        "another model."
    ),
    "two_lists": Odd(
        "odd has 2 lists of 4 blocks (num_hidden_layers): model.layers, model.more_layers; exactly one is needed, with "
        "every block in it once: choose another model."
    ),
    "between": Odd(
        "odd changes the hidden states between block 0 and block 1, outside of both; blocks must feed each other "
        "directly: choose another model."
    ),
    "twice": Odd(
        "odd does not run its blocks once each and in order (block 0 came at place 4); a unit runs once a pass: choose "
        "another model."
    ),
    "skipped": Odd("odd ran 3 of its 4 blocks; every block must run: choose another model."),
    "trained_argument": Odd(
        "odd passes something trained to its blocks besides the hidden states (a tensor of shape (64,)); its gradient "
        "would be lost: choose another model."
    ),
    "two_norms": Odd(
        "odd runs model.norm, model.second_norm between its last block and lm_head; only one final norm is run there: "
        "choose another model."
    ),
    "after_norm": Odd(
        "odd changes the hidden states between its last block and lm_head other than by a final norm; that would be "
        "left out: choose another model."
    ),
    "embedding": Odd(
        "odd has Sequential as input embedding and Linear as output projection; an Embedding and a Linear are needed: "
        "choose another model."
    ),
    "logits": Odd(parity="logits"),
    "loss": Odd(parity="loss"),
    "ids": Odd(parity="logits"),
    "not_causal": Odd(parity="logits (right-padded batch)"),
    "detached": Odd(parity="the gradient of"),
}


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        blocks, oddity = self.model.layers, config.oddity
        first = blocks[0]
        if oddity == "dropout":
            self.model.hidden_drop = nn.Dropout(0.25)
        elif oddity == "float32":
            first.mlp.gain = nn.Parameter(torch.ones(3, dtype=torch.float32))
        elif oddity == "tuple":
            for block in blocks:
                _wrap(block, lambda own, hidden, *args, **kwargs: (own(hidden, *args, **kwargs),))
            self.model.forward = self._loop(lambda block, hidden, **kwargs: block(hidden, **kwargs)[0])
        elif oddity == "extra":
            self.second_head = nn.Linear(64, 3)
        elif oddity == "shared":
            blocks[1].mlp.up_proj.weight = first.mlp.up_proj.weight
        elif oddity == "persistent":
            for block in blocks:
                block.mlp.register_buffer("running", torch.zeros(2))
        elif oddity == "unfilled":
            first.mlp.register_buffer("table", torch.arange(4.0), persistent=False)
        elif oddity == "attribute":
            first.mlp.table = torch.arange(4.0)
        elif oddity == "no_list":
            self.model.layers = nn.Sequential(*blocks)
        elif oddity == "two_lists":
            self.model.more_layers = copy.deepcopy(blocks)
        elif oddity == "between":
            self.model.forward = self._loop(lambda block, hidden, **kwargs: block(hidden * 1.0, **kwargs))
        elif oddity == "twice":
            self.model.forward = self._loop(lambda block, hidden, **kwargs: block(hidden, **kwargs), rounds=2)
        elif oddity == "skipped":
            self.model.forward = self._loop(lambda block, hidden, **kwargs: block(hidden, **kwargs), end=-1)
        elif oddity == "trained_argument":
            self.model.gain = nn.Linear(64, 1, bias=False)
            self.model.forward = self._loop(
                lambda block, hidden, **kwargs: block(hidden, gain=self.model.gain.weight[0], **kwargs)
            )
        elif oddity == "two_norms":
            self.model.second_norm = copy.deepcopy(self.model.norm)
            _wrap(self.lm_head, lambda own, hidden: own(hidden))
            self.model.forward = self._loop(
                lambda block, hidden, **kwargs: block(hidden, **kwargs), after=lambda h: self.model.second_norm(h)
            )
        elif oddity == "after_norm":
            self.model.forward = self._loop(
                lambda block, hidden, **kwargs: block(hidden, **kwargs), after=lambda h: h * 0.5
            )
        elif oddity == "embedding":
            self.model.embed_tokens = nn.Sequential(self.model.embed_tokens)
        elif oddity == "ids":
            _wrap(self.model.embed_tokens, lambda own, ids: own(ids) * (1 + ids.unsqueeze(-1) % 2))
        elif oddity == "not_causal":
            for block in blocks:
                block.self_attn.is_causal = False
        elif oddity == "detached":
            self.model.forward = self._loop(lambda block, hidden, **kwargs: block(hidden, **kwargs), detach=True)

    def _loop(self, run, *, rounds: int = 1, end: int | None = None, after=lambda hidden: hidden, detach: bool = False):
        """Llama's own loop over its blocks, with one thing changed."""

        def forward(input_ids, attention_mask=None, position_ids=None, **_kwargs):
            model = self.model
            hidden = model.embed_tokens(input_ids)
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
            rotary = model.rotary_emb(hidden, position_ids=positions)
            for _ in range(rounds):
                for index, block in enumerate(model.layers[:end]):
                    mine = hidden.detach() if detach and index == 0 and block.forward.__name__ != "record" else hidden
                    hidden = run(block, mine, position_embeddings=rotary, attention_mask=None)
            return type("Output", (), {"last_hidden_state": after(model.norm(hidden)), "cache": None})()

        return forward

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None, use_cache=False, **kwargs):
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
        logits = self.lm_head(found.last_hidden_state)
        if self.config.oddity == "logits":
            logits = logits * 1.01
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
            if self.config.oddity == "loss":
                loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        return type("Output", (), {"logits": logits, "loss": loss})()


def _wrap(module: nn.Module, forward) -> None:
    """Run `forward(own forward, ...)` in the place of the module's forward."""
    own = module.forward
    module.forward = lambda *args, **kwargs: forward(own, *args, **kwargs)


AutoConfig.register("odd", OddConfig)
AutoModelForCausalLM.register(OddConfig, OddForCausalLM)


def odd_config(oddity: str) -> OddConfig:
    """A toy Llama config of model type "odd" with one thing done otherwise; "" is Llama itself."""
    values = FAMILIES["llama"](False).to_dict()
    values.pop("model_type")
    config = OddConfig(**values)
    config.oddity = oddity
    return config
