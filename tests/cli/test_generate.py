"""slideformer generate, as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.test_commands import one_sentence
from slideformer.errors import RunFailed
from slideformer.train.generate import SoFar, TextStream
from train.toy import make_codec

QUICK = ("--device", "cpu", "--cpu-threads", "1", "--max-new-tokens", "6")


def own_text(folder: Path, text: str, num: int = 6) -> str:
    """What transformers makes of it, greedily."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    out = model.generate(ids, max_new_tokens=num, do_sample=False, attention_mask=torch.ones_like(ids))
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_text_is_that_of_the_models_own_generate(slideformer, toy) -> None:
    done = slideformer("generate", toy / "model", "--raw", "-p", "3+4 =", *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout == own_text(toy / "model", "3+4 =") + "\n"
    assert "6 tokens in" in done.stderr and "tokens/s" in done.stderr and "a pass" in done.stderr


def test_text_beyond_the_models_positions_is_warned_of(slideformer, toy, tmp_path, caplog) -> None:
    folder = tmp_path / "short"
    shutil.copytree(toy / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    assert slideformer("generate", toy / "model", "--raw", "-p", "3+4 =", *QUICK).returncode == 0
    assert "positions" not in caplog.text
    assert slideformer("generate", folder, "--raw", "-p", "3+4 =", *QUICK).returncode == 0
    assert "the model was made for 8 positions, and a prompt of 5 tokens with 6 new ones is longer" in caplog.text


def test_several_prompts_come_back_in_their_order_and_in_json(slideformer, toy, tmp_path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "a much longer one than the others"}\n{"prompt": "b"}\n')
    done = slideformer("generate", toy / "model", "--raw", "-p", "3+4 =", "--prompts", rows, "--json", *QUICK)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [g["prompt"] for g in found["generations"]] == ["3+4 =", "a much longer one than the others", "b"]
    assert [g["text"] for g in found["generations"]] == [
        own_text(toy / "model", g["prompt"]) for g in found["generations"]
    ]
    assert all(g["finish_reason"] == "length" and g["num_tokens"] == 6 for g in found["generations"])
    assert (found["num_tokens"], found["num_passes"]) == (18, 6)
    plain = slideformer("generate", toy / "model", "--raw", "-p", "3+4 =", "-p", "b", *QUICK)
    texts = [found["generations"][i]["text"] for i in (0, 2)]
    assert plain.stdout == f"> 3+4 =\n{texts[0]}\n\n> b\n{texts[1]}\n"


def test_a_checkpoint_generates_as_the_model_that_is_exported_from_it(slideformer, yaml_for, tmp_path) -> None:
    config = yaml_for(save_steps=1, learning_rate=0.1, warmup_ratio=0, freeze='["norm"]')
    assert slideformer("train", config).returncode == 0
    assert slideformer("export", "out/checkpoint-2", "exported", "--dtype", "float32").returncode == 0
    texts = {slideformer("generate", f, "-p", "1+1", *QUICK).stdout for f in ("out/checkpoint-2", "exported", "out")}
    assert len(texts) == 1
    untrained = slideformer("generate", "out/checkpoint-1", "-p", "1+1", *QUICK)
    assert untrained.returncode == 0, untrained.stderr
    assert untrained.stdout not in texts


def test_draws_differ_by_seed_and_are_the_same_for_one(slideformer, toy) -> None:
    def drawn(seed: int) -> str:
        hot = ("--temperature", "2", "--top-p", "0.95", "--top-k", "100", "--seed", seed)
        return slideformer("generate", toy / "model", "-p", "3+4", *QUICK, *hot).stdout

    assert drawn(1) == drawn(1) != drawn(2)


BAD = {
    "no prompt": ((), 2, "there is nothing to go on from: give --prompt TEXT, or --prompts FILE"),
    "no file": (("--prompts", "nowhere.jsonl"), 2, "the data file nowhere.jsonl does not exist"),
    "a placement": (("-p", "a", "--placement", "gpu"), 2, "--placement is 'gpu', must be auto, stream, resident"),
    "a dtype": (("-p", "a", "--dtype", "int8"), 2, "--dtype is 'int8', must be auto, bfloat16, float32"),
    "a size": (("-p", "a", "--max-host-memory", "much"), 2, "--max-host-memory: found 'much', which is no size"),
    "a temperature": (("-p", "a", "--temperature", "-1"), 2, "temperature is -1.0, must be a finite number"),
    "top-p that nothing draws by": (("-p", "a", "--top-p", "0.9"), 2, "so top_p: 0.9 would have no effect: set"),
    "both": (("-p", "a", "--top-k", "5", "--top-p", "0.9"), 2, "so top_k: 5 and top_p: 0.9 would have no effect"),
    "little memory": (("-p", "a", "--max-host-memory", "1MiB"), 3, "more than the 1.0 MiB of max_host_memory"),
}


@pytest.mark.parametrize(("words", "code", "text"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_and_a_code(slideformer, toy, words, code, text) -> None:
    done = slideformer("generate", toy / "model", "--device", "cpu", *words)
    assert text in one_sentence(done)
    assert done.returncode == code


ASKED = ("a much longer one than the others", "b", "3+4 =")
CALLS = ("generate", "MODEL", "--raw", *(w for p in ASKED for w in ("-p", p)), "--device", "cpu", "--cpu-threads", "1")


@pytest.fixture
def in_the_middle(monkeypatch) -> Callable[[Callable[[], None]], None]:
    """Do something when a pass has chosen the third token of each prompt."""

    def arrange(act: Callable[[], None]) -> None:
        take = SoFar.take

        def acting(self, taken) -> None:
            take(self, taken)
            if self.completion(0) is not None and len(self.completion(0).tokens) == 3:
                act()

        monkeypatch.setattr(SoFar, "take", acting)

    return arrange


def calls(toy: Path, *words: str) -> list[object]:
    return [toy / "model" if word == "MODEL" else word for word in (*CALLS, *words)]


def failing() -> None:
    raise RunFailed("the machine is at an end")


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        (partial(os.kill, os.getpid(), signal.SIGINT), 130, "stopped by SIGINT in the middle: 0 of 3 prompts are"),
        (partial(os.kill, os.getpid(), signal.SIGTERM), 143, "stopped by SIGTERM in the middle: 0 of 3 prompts are"),
        (failing, 1, "error: the machine is at an end"),
    ],
    ids=["Ctrl-C", "SIGTERM", "a failure"],
)
def test_an_early_end_keeps_what_there_is(slideformer, toy, in_the_middle, act, code, said) -> None:
    in_the_middle(act)
    texts = [own_text(toy / "model", prompt, 3) for prompt in ASKED]
    done = slideformer(*calls(toy, "--max-new-tokens", "500"))
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(said)) == (code, True), done.stderr
    heads = [f"> {prompt} [interrupted]\n" for prompt in ASKED]
    assert done.stdout == "\n".join(h + t + "\n" for h, t in zip(heads, texts, strict=True))
    found = json.loads(slideformer(*calls(toy, "--max-new-tokens", "500", "--json")).stdout)
    assert [(g["text"], g["finish_reason"]) for g in found["generations"]] == [(t, "interrupted") for t in texts]
    assert found["exit_code"] == code and found["error"] in done.stderr


def test_a_ctrl_c_before_there_is_anything_is_an_object_too(slideformer, toy, monkeypatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slideformer.train.generate.check_parity", interrupted)
    done = slideformer(*calls(toy, "--json"))
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")
    assert json.loads(done.stdout) == {"status": "stopped", "error": "stopped by Ctrl-C", "exit_code": 130}


def test_what_is_finished_is_written_while_others_go_on(slideformer, toy, tmp_path, monkeypatch, capfd) -> None:
    """So a process that is killed has lost nothing of it. The first prompt ends at its first token."""
    folder = tmp_path / "ends"
    shutil.copytree(toy / "model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (end,) = tokenizer(own_text(folder, ASKED[0], 1))["input_ids"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    seen: list[str] = []
    take = SoFar.take

    def watching(self, taken) -> None:
        seen.append(capfd.readouterr().out)
        take(self, taken)

    monkeypatch.setattr(SoFar, "take", watching)
    rest = slideformer("generate", folder, *calls(toy, "--max-new-tokens", "4")[2:]).stdout
    first = f"> {ASKED[0]}\n{own_text(folder, ASKED[0], 1)}\n"
    assert seen == ["", first, "", ""]
    assert rest.startswith(f"\n> {ASKED[1]}\n") and f"\n> {ASKED[2]}\n" in rest


def test_no_model_is_one_sentence(slideformer) -> None:
    done = slideformer("generate", "nowhere", "-p", "a")
    assert one_sentence(done).startswith("there is no folder nowhere: give a checkpoint")
    assert done.returncode == 2


def test_a_letter_is_shown_when_its_last_byte_has_come() -> None:
    codec = make_codec()
    stream = TextStream(codec)
    tokens = codec.encode_bare("aé€b")
    assert len(tokens) > 4, "the tokenizer knows these letters as a whole"
    shown = [stream.add(token) for token in tokens]
    assert "".join(shown) == "aé€b"
    assert "" in shown
