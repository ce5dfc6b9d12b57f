"""How a model is cut: flat order, offsets, tiles, ties, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slideformer.layout import Layout, Param, Tile, Unit, UnitKind

TABLE = Unit("table", UnitKind.TABLE, (Param("table", (7, 4)),))
OUTPUT = Unit("output", UnitKind.OUTPUT, (Param("output", (7, 4)),))
FINAL = Unit("final", UnitKind.FINAL, (Param("final", (4,), decay=False),))


def block(index: int, *params: Param) -> Unit:
    return Unit(f"block.{index}", UnitKind.BLOCK, params or (Param(f"w{index}", (3, 5)),))


@st.composite
def units(draw: st.DrawFn) -> Unit:
    shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    params = draw(st.lists(st.tuples(shapes, st.booleans(), st.booleans()), min_size=1, max_size=6))
    return block(0, *(Param(f"p{i}", shape, decay, trainable) for i, (shape, decay, trainable) in enumerate(params)))


def test_decaying_parameters_come_first_then_other_trained_then_frozen_ones_each_in_the_models_order():
    unit = block(
        0,
        Param("norm", (4,), decay=False),
        Param("frozen", (2, 2), trainable=False),
        Param("q", (4, 4)),
        Param("bias", (3,), decay=False),
        Param("k", (2, 4)),
    )
    assert list(unit.offsets.items()) == [("q", 0), ("k", 16), ("norm", 24), ("bias", 28), ("frozen", 31)]
    assert (unit.decay_numel, unit.train_numel, unit.numel) == (24, 31, 35)


@given(units())
def test_what_decays_is_a_prefix_of_what_is_trained_which_is_a_prefix_of_all(unit: Unit):
    for param in unit.params:
        begin, end = unit.offsets[param.name], unit.offsets[param.name] + param.numel
        assert (end <= unit.train_numel) if param.trainable else (begin >= unit.train_numel)
        assert (end <= unit.decay_numel) if param.trainable and param.decay else (begin >= unit.decay_numel)
    assert sum(p.numel for p in unit.params) == unit.numel


@given(units(), st.integers(1, 50))
def test_tiles_cover_a_unit_once_and_its_trained_prefix_with_the_same_cuts(unit: Unit, tile_numel: int):
    layout = Layout((TABLE, unit), tile_numel, tied=True)
    for trained, end in ((False, unit.numel), (True, unit.train_numel)):
        tiles = layout.tiles(1, trained=trained)
        assert [t.index for t in tiles] == list(range(len(tiles)))
        assert [x for t in tiles for x in range(t.start, t.stop)] == list(range(end))
        assert all(t.numel == tile_numel for t in tiles[:-1])
    whole, prefix = layout.tiles(1), layout.tiles(1, trained=True)
    assert prefix[:-1] == whole[: max(len(prefix) - 1, 0)]
    assert all(p.start == w.start for p, w in zip(prefix, whole, strict=False))


@pytest.mark.parametrize(
    ("tile_numel", "stops"), [(1, [4, 8, 12, 16, 20, 24, 28]), (9, [8, 16, 24, 28]), (28, [28]), (100, [28])]
)
def test_tiles_of_a_vocabulary_matrix_are_whole_rows(tile_numel: int, stops: list[int]):
    layout = Layout((TABLE, block(0), OUTPUT), tile_numel, tied=False)
    assert [t.stop for t in layout.tiles(0)] == [t.stop for t in layout.tiles(2)] == stops
    assert layout.tiles(0)[0] == Tile(0, 0, stops[0])


def test_units_are_found_by_kind_and_a_tied_output_is_the_table():
    glue = Unit("glue", UnitKind.GLUE, (Param("wpe", (5, 4)),))
    tied = Layout((TABLE, glue, block(0), block(1), FINAL), 8, tied=True)
    assert (tied.blocks, tied.output, tied.find(UnitKind.GLUE), tied.find(UnitKind.FINAL)) == ((2, 3), 0, 1, 4)
    assert tied.find(UnitKind.OUTPUT) is None
    untied = Layout((TABLE, block(0), FINAL, OUTPUT), 8, tied=False)
    assert (untied.output, untied.numel, untied.train_numel) == (3, 28 + 15 + 4 + 28, 75)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: block(0, Param("a", (0, 4))), r"unit block.0 has parameters without elements.*\['a'\]"),
        (lambda: Unit("final", UnitKind.FINAL, ()), "unit final has no parameters"),
        (lambda: Unit("t", UnitKind.TABLE, (Param("a", (4,)),)), r"unit t must hold exactly one matrix.*\[\(4,\)\]"),
        (lambda: Unit("t", UnitKind.OUTPUT, OUTPUT.params * 2), "unit t must hold exactly one matrix"),
        (lambda: Layout((TABLE, FINAL), 8, True), "units must be table, glue\\?, block.*found \\['table', 'final'\\]"),
        (lambda: Layout((block(0),), 8, True), "units must be table, glue"),
        (lambda: Layout((TABLE, FINAL, block(0)), 8, True), "units must be table, glue"),
        (lambda: Layout((TABLE, block(0), FINAL, FINAL), 8, True), "only blocks may occur more than once"),
        (lambda: Layout((TABLE, block(0), OUTPUT), 8, True), "a tied layout has no output unit"),
        (lambda: Layout((TABLE, block(0)), 8, False), "an untied one has exactly one"),
        (lambda: Layout((TABLE, block(0)), 0, True), "tile_numel is 0, must be at least 1"),
        (lambda: Layout((TABLE, block(0), block(0)), 8, True), r"parameters covered twice: \['w0'\]"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_sentence(make, text: str):
    with pytest.raises(ValueError, match=text):
        make()


def test_an_untrained_layout_has_the_same_places_and_nothing_to_train():
    block = Unit("b", UnitKind.BLOCK, (Param("norm", (4,), decay=False), Param("w", (4, 4))))
    layout = Layout((Unit("t", UnitKind.TABLE, (Param("t", (8, 4)),)), block), 10, tied=True)
    bare = layout.untrained()
    assert (bare.train_numel, bare.numel) == (0, layout.numel)
    assert [u.offsets for u in bare.units] == [u.offsets for u in layout.units]
    with pytest.raises(ValueError, match="some parameters are frozen"):
        bare.untrained()
