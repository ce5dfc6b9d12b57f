"""How many hidden states stay on the device when nobody says."""

from __future__ import annotations

import torch

from engine.toys import engine_on, toy_decoder, toy_options
from slideformer.engine.fit import budget_of, saved_that_fit, workspace_nbytes


def fitting(device_nbytes: int | None, **changes) -> int | None:
    decoder = toy_decoder()
    sizes = {"hidden_size": decoder.hidden_size, "dtype": torch.float32}
    return saved_that_fit(decoder.layout, toy_options(**changes), **sizes, device_nbytes=device_nbytes)


def test_as_many_stay_as_there_is_room_for_beside_all_else():
    decoder = toy_decoder()
    sizes = {"hidden_size": decoder.hidden_size, "dtype": torch.float32}
    options = toy_options(saved_on_device=0)
    least = budget_of(decoder.layout, options, **sizes).device_nbytes
    least += workspace_nbytes(decoder.layout, options, **sizes)
    each = options.micro_batch_size * options.max_length * decoder.hidden_size * 4
    assert fitting(least - 1) == fitting(0) == 0
    assert [fitting(least + each * n + n) for n in range(4)] == [0, 1, 2, 3]
    assert fitting(2**40) == options.most_saved(decoder.layout) == len(decoder.layout.blocks) + 1
    assert fitting(2**40, micro_batches=3) == 3 * (len(decoder.layout.blocks) + 1)


def test_what_was_chosen_is_what_is_allocated():
    decoder = toy_decoder()
    sizes = {"hidden_size": decoder.hidden_size, "dtype": torch.float32}
    for saved in (0, 2, 5):
        options = toy_options(saved_on_device=saved)
        with engine_on(decoder, options) as engine:
            assert engine.budget == budget_of(decoder.layout, options, **sizes)
            assert engine.step_options.hidden_pool == saved


def test_on_the_cpu_all_stay():
    assert fitting(None) is None
    decoder = toy_decoder()
    with engine_on(decoder, toy_options()) as engine:
        assert engine.step_options.hidden_pool == engine.options.most_saved(decoder.layout)
