"""What a checkpoint says of the last bits: what ran, not what was asked for; and what is told of a difference."""

from __future__ import annotations

import pytest

from engine.toys import engine_on, toy_decoder, toy_options
from slideformer.train.fingerprint import bit_differences, bits_on

ASKED = {"device": "cuda", "per_device_train_batch_size": 8, "kernels": "torch"}


@pytest.mark.parametrize(
    ("rows", "finds", "seen"), [(8, True, 8), (3, True, "8, 3 at a time"), (16, True, 8), (3, False, 8)]
)
def test_rows_are_those_that_go_together(rows, finds, seen):
    """More than there are: for an evaluation. Nothing is split where that was not asked for."""
    with engine_on(toy_decoder(), toy_options(micro_batch_size=rows, find_micro_batch=finds)) as engine:
        assert bits_on(engine, ASKED) == {**ASKED, "per_device_train_batch_size": seen, "output projection": "whole"}


def test_slices_of_the_output_projection_are_told(tmp_path):
    found = []
    for tile, sliced in ((5000, False), (5000, True), (640, True), (640, False)):
        with engine_on(toy_decoder(tile=tile), toy_options(sliced_head=sliced)) as engine:
            found.append(bits_on(engine, ASKED))
    told = [bit_differences(then, now) for then, now in zip(found, found[1:], strict=False)]
    assert told[0] == ["output projection was whole and is now in slices (tile_numel 5000)"]
    assert told[1] == ["output projection was in slices (tile_numel 5000) and is now in slices (tile_numel 640)"]
    assert told[2] == ["output projection was in slices (tile_numel 640) and is now whole"]
    assert bit_differences(found[0], found[3]) == [], "another tile_numel without slices"


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (
            {"attn_implementation": "auto", "kernels": "auto"},
            {"attn_implementation": "sdpa", "kernels": "glu of torch"},
        ),
        ({"kernels": "triton"}, {"kernels": "glu of triton"}),
        ({}, {"output projection": "whole"}),
        ({"of an older version": 1}, {}),
    ],
    ids=["auto", "a family", "not known then", "not known now"],
)
def test_a_record_of_another_version_is_no_difference(then, now):
    assert bit_differences({"torch": "1", **then}, {"torch": "1", **now}) == []
    assert bit_differences({"torch": "1", **then}, {"torch": "2", **now}) == ["torch was 1 and is now 2"]
