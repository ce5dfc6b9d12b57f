"""A run from its config to a saved model, and the Python interface to it.

`Trainer.train` reads from top to bottom: what can be wrong is found before anything of the model's size is allocated,
then the engine is opened, loaded, and handed to the loop.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from slideformer.config import TrainConfig
from slideformer.data import Batches, Codec, Dataset, evaluation_sets, training_batches
from slideformer.data.prompts import Prompt, Words
from slideformer.device import Device, open_device, require_device
from slideformer.engine import Decided, Engine
from slideformer.errors import BadInput, RunFailed
from slideformer.model.decoder import Decoder
from slideformer.model.folder import save_model
from slideformer.model.parity import check_parity
from slideformer.model.sampling import Sampling
from slideformer.train import checkpoint
from slideformer.train.best import Judge, Rule, rule_of
from slideformer.train.callbacks import Callbacks, State
from slideformer.train.card import Facts
from slideformer.train.checkpoint import Damaged, Progress, folder_name
from slideformer.train.console import Console, open_console
from slideformer.train.disk_use import filled_nbytes, require_offload_dir, require_writes_left
from slideformer.train.evaluation import Sets, evaluate
from slideformer.train.generate import Completion, complete
from slideformer.train.hub import push, require_hub
from slideformer.train.inputs import Data, Inputs, Model, inputs_of
from slideformer.train.journal import Journal
from slideformer.train.loop import Loop, Work
from slideformer.train.metrics import METRICS, MetricsFile, lines_until
from slideformer.train.output import claimed
from slideformer.train.peak import peak_tflops
from slideformer.train.plot import plot_loss
from slideformer.train.record import RunRecord, versions
from slideformer.train.recorded import recorded
from slideformer.train.resume import Origin, earlier, find_origin
from slideformer.train.retention import clean
from slideformer.train.samples import Samples, sample_prompts, with_samples
from slideformer.train.save import CHAT_TEMPLATE, companions, save
from slideformer.train.schedule import Schedule, num_steps
from slideformer.train.setup import build_decoder, determinism, device_kind, engine_options, require_gds, save_dtype
from slideformer.train.start import tell_start
from slideformer.train.stop import StopRequests, let_go
from slideformer.train.trackers import Trackers, require_trackers


@dataclass(frozen=True, slots=True)
class Result:
    """What `Trainer.train` gives. training_loss: mean over this call's steps. metrics: the last value of each."""

    global_step: int
    training_loss: float | None
    metrics: Mapping[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known of a run before the device is asked for anything."""

    codec: Codec
    dataset: Dataset
    batches: Batches
    evaluation: Sets
    schedule: Schedule
    rule: Rule
    num_steps: int
    samples: list[Prompt]


def train(config: TrainConfig, console: Console) -> Path:
    """Run the whole of a config and return the folder of the result. Raises as `Trainer.train` does."""
    with Trainer(args=config, console=console) as trainer:
        trainer.train()
    return Path(config.output_dir)


class Trainer:
    """One run. The arguments are those of Hugging Face's Trainer; what is given beside `args` wins over it.

    Context manager: `close` frees the model's state, which stays after `train` for `evaluate` and `save_model`.
    state: how far the run is, with `log_history`.
    """

    def __init__(
        self,
        model: Model | None = None,
        args: TrainConfig | None = None,
        train_dataset: Data = None,
        eval_dataset: Data | Mapping[str, Data] = None,
        processing_class: object | None = None,
        callbacks: Sequence[object] = (),
        *,
        console: Console | None = None,
    ) -> None:
        """model: a folder, or a Hugging Face module, whose weights are read when they are needed and set when `train`
        is done. Datasets: paths, or rows (mappings as in a file, or with input_ids and labels); eval_dataset also by
        name. processing_class: the tokenizer, if it is not the model folder's. callbacks: objects with methods of
        transformers' TrainerCallback. console: where to tell what happens; None is standard output.
        Raises BadInput.
        """
        self._inputs: Inputs = inputs_of(
            model, TrainConfig() if args is None else args, train_dataset, eval_dataset, processing_class
        )
        self._callbacks = Callbacks(callbacks, self.args, model=self._inputs.module, processing_class=processing_class)
        self._given_console = console
        self._held, self._held_engine = ExitStack(), ExitStack()
        self._prepared: Prepared | None = None
        self._built: tuple[Device, Decoder] | None = None
        self._engine: Engine | None = None
        self._peak: tuple[float, str] | None = None
        self._has_weights = self._trained = self._closed = False
        self._callbacks.fire("on_init_end")

    @property
    def args(self) -> TrainConfig:
        """The config, with what was given beside it in its fields' place."""
        return self._inputs.config

    @property
    def state(self) -> State:
        return self._callbacks.state

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Result:
        """Run to the end and save the result in output_dir, with metrics.jsonl, run.json and loss.png beside it.

        resume_from_checkpoint: as the field of that name, over which it wins. Once for each Trainer.
        Raises BadInput and DoesNotFit before anything of the model's size is allocated, RunFailed afterwards, and
        Stopped when a signal asked for the end; after any of them the trainer is closed.
        """
        if self._trained:
            raise RunFailed("this Trainer has trained already: make another one, and resume from its checkpoint")
        config = self.args
        if resume_from_checkpoint is not None:
            config = config.model_copy(update={"resume_from_checkpoint": resume_from_checkpoint})
        self._trained = True
        target = Path(config.output_dir)
        with self._closed_on_failure(), self._console() as console:
            self._held.enter_context(claimed(target))
            clean(target)
            found = earlier(config, console)  # before the data, which may take minutes to read
            prepared = self.prepare(console)
            device, decoder = self.build()
            origin = find_origin(config, found, prepared.batches, decoder, device.kind)
            record = RunRecord(target, config, {"data": [r.as_dict() for r in prepared.dataset.reports]})
            with StopRequests() as stop:
                engine = self._open_at(origin, prepared.num_steps)
                start = self._start(origin, engine, console)
                kept = lines_until(target / METRICS, start.step, evaluated=start.evaluated) if start.step else ""
                with (
                    MetricsFile(target / METRICS, kept=kept) as file,
                    Trackers(config, console.warn, first_step=start.step + 1) as trackers,
                    origin.saver(config, engine, console) as saver,
                    Samples(config, engine, prepared.codec, prepared.samples, after_step=start.step) as samples,
                ):
                    journal = Journal(file, trackers, self._callbacks, console)
                    judge = Judge(prepared.rule, start.judged, start.best_saved)
                    work = Work(
                        config,
                        engine,
                        device,
                        prepared.batches,
                        prepared.evaluation,
                        prepared.schedule,
                        prepared.num_steps,
                        samples,
                        self._peak and self._peak[0],
                    )
                    loop = Loop(work, journal, judge, saver, stop, start)
                    loop.stop_if_asked("before the first step", start.step)
                    with recorded(record, journal, work, start, self._peak):
                        tell_start(work, start, console)
                        loop.run()
                        self._load_best(judge, engine, console)
                        names = self._save(target, Facts(config.model_dump(mode="json"), versions(), journal.last))
                        self._inputs.give_back(engine)
            plot_loss(target, console.warn)
            console.note(f"the model is in {target}")
            if config.push_to_hub:
                address = push(target, names, config.repo_id, private=config.hub_private_repo)
                console.note(f"pushed to {address}")
        loss = loop.loss_sum / loop.num_losses if loop.num_losses else None
        return Result(self.state.global_step, loss, dict(journal.last))

    def evaluate(self) -> dict[str, float]:
        """eval_loss and eval_perplexity of every evaluation set, with the weights as they are now.

        Raises BadInput when there is none, and as `train` does; then the trainer is closed.
        """
        with self._closed_on_failure(), self._console() as console:
            prepared = self.prepare(console)
            if not prepared.evaluation:
                raise BadInput("there is nothing to evaluate: give eval_dataset or val_size")
            engine = self._open(loads=True)
            metrics = evaluate(engine, prepared.evaluation)
            line = {"global_step": self.state.global_step, "epoch": round(self.state.epoch, 4), **metrics}
            console.evaluation(line)
            self._callbacks.log(line)
            self._callbacks.fire("on_evaluate", metrics=dict(metrics))
            return metrics

    def generate(
        self,
        prompts: Sequence[Words],
        sampling: Sampling | None = None,
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> list[Completion]:
        """What the model writes behind each prompt, with the weights as they are now; greedy if nothing else is said.

        prompts: texts or lists of messages. chat: whether text goes through the chat template; None: if there is one.
        Raises as `train` does; then the trainer is closed.
        """
        with self._closed_on_failure(), self._console() as console:
            codec = self.prepare(console).codec
            engine = self._open(loads=True)
            return complete(engine, codec, prompts, sampling or Sampling(), chat=chat, system=system)

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the weights as they are now as a Hugging Face folder, and return it. None: output_dir of the config.

        Raises RunFailed when nothing has been loaded or trained yet.
        """
        if self._engine is None or not self._has_weights:
            raise RunFailed("there are no weights to save: train or evaluate first")
        target = Path(output_dir or self.args.output_dir)
        self._save(target, None)
        return target

    def close(self) -> None:
        """Free the model's state and the device. Raises LaneFailure if a step failed and nobody has heard of it."""
        self._closed, self._engine = True, None
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # in order

    def prepare(self, console: Console) -> Prepared:
        """Read the data and check all that needs no device. Raises BadInput."""
        if self._closed:
            raise RunFailed("this Trainer is closed: make another one")
        if self._prepared is not None:
            return self._prepared
        inputs, config = self._inputs, self.args
        require_device(config.device)
        require_gds(config, device_kind(config))
        require_offload_dir(config)
        require_trackers(config)
        if config.push_to_hub:
            require_hub(config.repo_id)
        if inputs.folder is not None:
            companions(inputs.folder)
        model_config = inputs.model_config  # a wrong folder is found before the tokenizer and the data are read
        codec = inputs.codec()
        dataset = inputs.dataset(codec, console.note)
        inputs.check_rows(dataset, console.warn)
        batches = training_batches(dataset, config, codec)
        evaluation = evaluation_sets(dataset, config, codec)
        if config.eval_strategy != "no" and not evaluation:
            raise BadInput(f"eval_strategy is {config.eval_strategy}, but there is no eval_dataset: give one")
        if config.eval_on_start and not evaluation:
            raise BadInput("eval_on_start is true, but there is no eval_dataset: give one")
        rule = rule_of(config, list(evaluation))
        steps = num_steps(config, batches)
        schedule = Schedule(config, steps)
        for report in dataset.reports:
            for line in report.lines():
                console.note(line)
            for warning in report.warnings():
                console.warn(warning)
        for warning in (*batches.warnings(), *schedule.warnings(steps)):
            console.warn(warning)
        check_parity(
            model_config, attn_implementation=config.attn_implementation, disable_dropout=config.disable_dropout
        )
        samples = sample_prompts(config, codec) if config.generate_steps else []
        self._prepared = Prepared(codec, dataset, batches, evaluation, schedule, rule, steps, samples)
        return self._prepared

    def build(self) -> tuple[Device, Decoder]:
        """The device, and the model without its weights, whose names and shapes are checked. Raises BadInput."""
        if self._built is None:
            self._held.enter_context(determinism(self.args))
            device = self._held.enter_context(open_device(self.args.device))
            decoder = build_decoder(self.args, device.kind, device.torch_device, self._inputs.model_config)
            self._inputs.check_weights(decoder)
            self._built = device, decoder
        return self._built

    def _open(self, *, loads: bool, earlier: Decided | None = None) -> Engine:
        """The engine. loads: with the model's weights, unless it has some. earlier: see `EngineOptions`."""
        device, decoder = self.build()
        if self._engine is None:
            self._peak = peak_tflops(device, decoder.dtype)
            samples = self._prepared.samples if self._prepared is not None else []
            options = with_samples(engine_options(self.args), decoder, samples, self.args.generate_max_new_tokens)
            engine = Engine(decoder, device, replace(options, earlier=earlier))
            self._engine = self._held.enter_context(self._held_engine).enter_context(engine)
        if loads and not self._has_weights:
            self._inputs.load(self._engine)
            self._has_weights = True
        return self._engine

    def _open_at(self, origin: Origin, num_steps: int) -> Engine:
        """The engine, loaded unless a checkpoint will be. Raises BadInput, before anything is loaded, where
        max_disk_writes leaves no room for that and for steps."""
        if self._engine is not None and origin.decided and not origin.decided.holds_for(self._engine.decided):
            self._has_weights, self._engine = False, None  # that of an `evaluate` before; it must have gone
            self._held_engine.close()
            gc.collect()
        engine, filled, goes_on = self._open(loads=False, earlier=origin.decided), 0, bool(origin.found)
        if goes_on or not self._has_weights:
            filled = filled_nbytes(engine.layout, engine.step_options, engine.decoder.dtype, goes_on=goes_on)
        filled += engine.disk_traffic[1]  # its measuring
        if origin.first_step < num_steps:
            require_writes_left(self.args, filled, engine.disk_writes_per_step, before=origin.disk_writes)
        return self._open(loads=not goes_on)

    def _start(self, origin: Origin, engine: Engine, console: Console) -> Progress:
        """How far the run is; the engine has its state then, and schedule and callbacks theirs."""
        if not origin.found:
            return origin.beginning
        start = origin.load(engine, Path(self.args.model_name_or_path), console)
        self._has_weights = True
        assert self._prepared is not None
        for _, metric in start.judged:
            self._prepared.schedule.observe(metric)
        self._callbacks.restore(start.callbacks)
        self.state.global_step, self.state.num_input_tokens_seen = start.step, start.num_input_tokens_seen
        return start

    def _load_best(self, judge: Judge, engine: Engine, console: Console) -> None:
        """load_best_model_at_end: take the state of the best checkpoint, unless it is the one there is."""
        best = judge.best_saved
        if not self.args.load_best_model_at_end or best is None or best == self.state.global_step:
            return
        folder = Path(self.args.output_dir) / folder_name(best)
        value = dict(judge.judged)[best]
        try:
            checkpoint.open_checkpoint(folder).load(engine)
        except Damaged as error:
            raise RunFailed(f"{folder} was the best checkpoint, and cannot be loaded: {error}") from error
        console.note(f"the result is that of step {best}, whose {judge.rule.metric} of {value:.4f} was the best")

    def _save(self, target: Path, facts: Facts | None) -> list[str]:
        """Write the model; facts: for its card. Returns the names of the files."""
        assert self._engine is not None
        dtype = save_dtype(self.args, self._engine.decoder)
        if self._inputs.folder is not None:
            names = list(save(self._engine, self._inputs.folder, target, dtype, facts).names)
        else:
            generation = getattr(self._inputs.module, "generation_config", None)
            read = self._engine.read
            names = [*save_model(target, self._engine.decoder, read, dtype=dtype, generation_config=generation)]
        if self._inputs.tokenizer is not None:
            names += [Path(path).name for path in self._inputs.tokenizer.save_pretrained(str(target))]
        if self.args.chat_template is not None:
            shutil.copyfile(self.args.chat_template, target / CHAT_TEMPLATE)
            names = [*(name for name in names if name != CHAT_TEMPLATE), CHAT_TEMPLATE]
        return names

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        with ExitStack() as failing:
            failing.push(partial(let_go, self._held))
            failing.callback(self._forget)
            yield
            failing.pop_all()

    def _forget(self) -> None:
        self._closed, self._engine = True, None

    @contextmanager
    def _console(self) -> Iterator[Console]:
        if self._given_console is not None:
            yield self._given_console
            return
        with open_console(sys.stdout) as console:
            yield console
