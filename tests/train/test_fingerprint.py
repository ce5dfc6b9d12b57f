"""What a checkpoint says of the last bits: what ran, not what was asked for; and what is told of a difference."""

from __future__ import annotations

import pytest

from engine.toys import engine_on, toy_decoder, toy_options
from slideformer.device.cpu import CpuDevice
from slideformer.engine import Decided
from slideformer.train.fingerprint import bit_differences, bits_on, decided

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


TRAIN, EVALUATION, HEAD = "per_device_train_batch_size", "per_device_eval_batch_size", "output projection"
NOW = {"device": "cuda", TRAIN: 8, EVALUATION: 12}


@pytest.mark.parametrize(("finds", "sliced", "rows"), [(True, True, 3), (True, False, 8), (True, True, 12)])
def test_what_an_engine_decided_is_read_back(finds, sliced, rows):
    options = toy_options(micro_batch_size=rows, find_micro_batch=finds, sliced_head=sliced)
    with engine_on(toy_decoder(tile=640), options) as engine:
        recorded = bits_on(engine, NOW)
        assert decided(recorded, NOW, 640) == engine.decided == Decided(sliced, rows)


def test_rows_of_an_evaluation_that_go_together_are_told():
    with engine_on(toy_decoder(), toy_options(micro_batch_size=8, find_micro_batch=True)) as engine:
        assert bits_on(engine, NOW) == {**NOW, EVALUATION: "12, 8 at a time", HEAD: "whole"}


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ({TRAIN: 8}, Decided(None, None)),
        ({TRAIN: 8, HEAD: "whole"}, Decided(False, None)),
        ({TRAIN: "8, 3 at a time", HEAD: "in slices (tile_numel 640)"}, Decided(True, 3)),
        ({TRAIN: 8, HEAD: "in slices (tile_numel 5000)"}, Decided(None, None)),
        ({TRAIN: "9, 3 at a time", EVALUATION: "12, 3 at a time"}, Decided(None, None)),
        ({TRAIN: "8, 3 at a time", EVALUATION: "9, 3 at a time"}, Decided(None, 3)),
        ({TRAIN: 8, EVALUATION: 9}, Decided(None, None)),
        ({TRAIN: "8, 0 at a time", HEAD: ["of a version to come"]}, Decided(None, None)),
        ({}, Decided(None, None)),
        ({TRAIN: 8, HEAD: "whole", "device": "cpu"}, None),
    ],
    ids=str,
)
def test_what_another_record_says_counts_where_it_gives_the_same_bits(then, expected):
    """Of an older version: without an evaluation's rows, or a head. Else: other sizes were asked for, or another device
    is here."""
    assert decided({"device": "cuda", **then}, NOW, 640) == expected


class Card(CpuDevice):
    model = "NVIDIA H200 with 132 multiprocessors"


def test_another_gpu_is_told_by_its_name_and_a_record_without_one_is_no_difference():
    """A kernel's sums are cut to the number of multiprocessors."""
    with engine_on(toy_decoder(), toy_options(), Card()) as engine:
        now = bits_on(engine, NOW)
    other = "NVIDIA A100-SXM4-80GB with 108 multiprocessors"
    assert bit_differences({**now, "GPU": other}, now) == [f"GPU was {other} and is now {Card.model}"]
    assert bit_differences({name: now[name] for name in now if name != "GPU"}, now) == []
