"""Weights from and to safetensors files, in pieces of at most one tile: no tensor is ever whole in memory.

A checkpoint is checked as a whole (names, shapes, types, lengths) from its headers before the first value is handed on.
Where values live is the caller's business: reading hands pieces to `write`, saving asks `read` for them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slideformer.errors import BadInput
from slideformer.layout import Layout, Param
from slideformer.model import files, pickled, tensorfile

Write = Callable[[int, int, torch.Tensor], None]
Read = Callable[[int, int, int], torch.Tensor]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_UNFINISHED = ".saving"  # folder inside the target; files are renamed out of it when all of them are complete
_FLOATS = {name: dtype for name, dtype in tensorfile.DTYPES.items() if dtype.is_floating_point}
# Buffers that older checkpoints of many families store and that the model computes for itself.
_IGNORED = (r"rotary_emb\.inv_freq$", r"\.masked_bias$")


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """How names in files may differ from those in the layout. A Decoder knows its own (`decoder.names`).

    stored: name in the layout -> name in files, where they differ (transformers renamed a module, its files keep the
    old name). base_prefix: left out in files saved from the model without its head ("model."). tied_copy: the second
    name of the table when the output projection is tied to it. ignored: patterns of entries that are no parameters.
    """

    stored: Mapping[str, str] = field(default_factory=dict)
    base_prefix: str = ""
    tied_copy: str | None = None
    ignored: tuple[str, ...] = ()


def check(folder: Path | str, layout: Layout, *, names: CheckpointNames, allow_pickle: bool = False) -> None:
    """Read headers only and raise what `load` would raise before it hands on the first value."""
    _match(Path(folder), layout, names, allow_pickle)


def load(
    folder: Path | str,
    layout: Layout,
    write: Write,
    *,
    names: CheckpointNames,
    dtype: torch.dtype = torch.float32,
    allow_pickle: bool = False,
) -> None:
    """Hand every parameter of the layout to `write(unit, offset, values)`, each element exactly once.

    values: [<= layout.tile_numel] of `dtype`, on the CPU, valid only during the call (the buffer is used again).
    offset: of values[0] in the unit's flat vector. Pieces come in the order of the files. Blocks the calling thread.
    allow_pickle: take pytorch_model.bin where there is no safetensors file (see `pickled`).
    Raises BadInput naming file and tensor: no safetensors, an index that does not fit its files, a truncated file, a
    tensor missing, unexpected, stored twice, of another shape or not of floats, non-finite values, or an output
    projection that is tied by the config but stored as another tensor than the table.
    """
    matched, tied_copy = _match(Path(folder), layout, names, allow_pickle)
    numel = layout.tile_numel
    if tied_copy is not None:
        _compare(*tied_copy, numel)
    buffer = torch.empty(numel * max(_FLOATS[e.dtype].itemsize for e, _, _ in matched), dtype=torch.uint8)
    converted = torch.empty(numel, dtype=dtype)
    for entry, unit, offset in matched:
        start = 0
        for piece in tensorfile.pieces(entry, numel, buffer):
            values = converted[: len(piece)].copy_(piece)
            if not all(end.isfinite() for end in values.aminmax()):  # one pass, no mask; NaN is both min and max
                raise BadInput(
                    f"{entry.file}: {entry.name} holds values that are not finite in {_name(dtype)}; weights must be "
                    "finite numbers: use another checkpoint."
                )
            write(unit, offset + start, values)
            start += len(values)


def reader(folder: Path | str, layout: Layout, *, names: CheckpointNames) -> Read:
    """read(unit, start, stop) of the values as stored, within one parameter at a time. Raises BadInput as `load`."""
    matched, tied_copy = _match(Path(folder), layout, names)
    if tied_copy is not None:
        _compare(*tied_copy, layout.tile_numel)
    entries = {(unit, offset): entry for entry, unit, offset in matched}

    def read(unit: int, start: int, stop: int) -> torch.Tensor:
        offset = max(o for o in layout.units[unit].offsets.values() if o <= start)
        return tensorfile.values(entries[unit, offset], start - offset, stop - offset)

    return read


def save(
    folder: Path | str,
    layout: Layout,
    read: Read,
    *,
    dtype: torch.dtype,
    names: CheckpointNames,
    max_shard_nbytes: int = 5 * 10**9,
    beside: dict[str, str] | None = None,
) -> dict[str, files.Sum]:
    """Write the layout's parameters as model.safetensors, or as shards with an index when they exceed one shard.

    read(unit, start, stop): values [stop - start] of the unit's flat vector, any float type, on the CPU; asked for at
    most layout.tile_numel elements at a time, in flat order per parameter; converted to `dtype`.
    beside: other files of the same save, name -> text (config.json), renamed into place together with the weights.
    A tied output projection is stored once, as the table. Files are complete on disk before any old one is replaced;
    of what an earlier save left behind only files that its index names are removed. Returns name -> size and sum
    of what was written. Raises OSError.
    """
    folder = Path(folder)
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    shards = _shards(layout, dtype.itemsize, max_shard_nbytes)
    file_names = [SINGLE if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
                  for i in range(len(shards))]  # fmt: skip
    sums = {}
    for file_name, shard in zip(file_names, shards, strict=True):
        tensors = _tensors(shard, read, dtype, names)
        sums[file_name] = files.write_file(unfinished / file_name, _writer(tensors, layout.tile_numel))
    texts = dict(beside or {})
    if len(shards) > 1:
        weight_map = {names.stored.get(p.name, p.name): f for f, shard in zip(file_names, shards, strict=True)
                      for _, _, p in shard}  # fmt: skip
        total = {"total_parameters": layout.numel, "total_size": layout.numel * dtype.itemsize}
        texts[INDEX] = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    sums |= {name: files.write_text(unfinished / name, text) for name, text in texts.items()}
    _replace(folder, unfinished, list(sums))
    return sums


def _replace(folder: Path, unfinished: Path, written: list[str]) -> None:
    stale = (_indexed_files(folder) | {INDEX, SINGLE}) - set(written)
    # What leads to the old weights goes first: between here and the end the folder is refused for want of weights,
    # never read as a mix of two saves. (model.safetensors itself is replaced in one go.)
    for name in (INDEX, SINGLE):
        if name == INDEX or name in stale:
            (folder / name).unlink(missing_ok=True)
    for name in written:
        os.replace(unfinished / name, folder / name)
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    unfinished.rmdir()
    files.flush(folder)


def _indexed_files(folder: Path) -> set[str]:
    """Shards that an index in the folder names, if it can be read; only plain names, never a path elsewhere."""
    try:
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {n for n in names if isinstance(n, str) and re.fullmatch(r"[\w.-]+\.safetensors", n)}


_Placed = tuple[int, int, Param]  # unit, offset of the parameter in it, parameter


def _placed(layout: Layout) -> Iterator[_Placed]:
    for index, unit in enumerate(layout.units):
        for param in unit.params:
            yield index, unit.offsets[param.name], param


def _shards(layout: Layout, itemsize: int, max_nbytes: int) -> list[list[_Placed]]:
    """Parameters in layout order, a new shard whenever the next would exceed the limit; one alone may exceed it."""
    shards: list[list[_Placed]] = []
    filled = 0
    for placed in _placed(layout):
        nbytes = placed[2].numel * itemsize
        if not shards or filled + nbytes > max_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(placed)
        filled += nbytes
    return shards


def _tensors(shard: list[_Placed], read: Read, dtype: torch.dtype, names: CheckpointNames) -> list[tensorfile.Writing]:
    def reader(unit: int, offset: int) -> Callable[[int, int], torch.Tensor]:
        return lambda start, stop: read(unit, offset + start, offset + stop).to(dtype)

    return [
        tensorfile.Writing(names.stored.get(p.name, p.name), dtype, p.shape, p.numel, reader(unit, offset))
        for unit, offset, p in shard
    ]


def _writer(tensors: list[tensorfile.Writing], piece_numel: int) -> Callable[[files.Summing], None]:
    return lambda out: tensorfile.write(out, tensors, piece_numel=piece_numel)


def _match(
    folder: Path, layout: Layout, names: CheckpointNames, allow_pickle: bool = False
) -> tuple[list[tuple[tensorfile.Entry, int, int]], tuple[tensorfile.Entry, tensorfile.Entry] | None]:
    """Where each parameter is stored, in file order, and the pair to compare if the tied projection is stored too."""
    entries = _entries(folder, allow_pickle)
    wanted = {param.name: (param, unit, offset) for unit, offset, param in _placed(layout)}
    layout_names = {stored: name for name, stored in names.stored.items()}
    entries = {layout_names.get(name, name): entry for name, entry in entries.items()}
    prefix = names.base_prefix
    if prefix and not any(name.startswith(prefix) for name in entries):
        known = {n for n in wanted if n.startswith(prefix)}
        entries = {prefix + n if prefix + n in known else n: entry for n, entry in entries.items()}
    table = layout.units[0].params[0].name
    copy = entries.pop(names.tied_copy, None) if layout.tied and names.tied_copy else None
    if copy is not None and table not in entries:
        entries[table], copy = copy, None
    missing = sorted(set(wanted) - set(entries))
    if missing:
        raise BadInput(
            f"{folder} does not hold {_listed(missing)}; every parameter of the model must be there: check that "
            "config.json belongs to this checkpoint" + (_TIED_HINT if missing == [_output_name(layout)] else ".")
        )
    ignored = [re.compile(pattern) for pattern in (*_IGNORED, *names.ignored)]
    surplus = [n for n in sorted(set(entries) - set(wanted)) if not any(p.search(n) for p in ignored)]
    if surplus:
        raise BadInput(
            f"{entries[surplus[0]].file} holds {_listed(surplus)}, which the model does not have; only its own "
            "parameters are allowed: check that config.json belongs to this checkpoint."
        )
    found = [(entries[name], unit, offset, param) for name, (param, unit, offset) in wanted.items()]
    for entry, _, _, param in found:
        _check_entry(entry, param)
    if copy is not None:
        _check_entry(copy, layout.units[0].params[0])
    matched = sorted(((e, u, o) for e, u, o, _ in found), key=lambda m: (m[0].file.name, m[0].start))
    return matched, None if copy is None else (entries[table], copy)


_TIED_HINT = ", or set tie_word_embeddings to true in it if the output projection is the embedding."


def _output_name(layout: Layout) -> str:
    return layout.units[layout.output].params[0].name


def _check_entry(entry: tensorfile.Entry, param: Param) -> None:
    if entry.dtype not in _FLOATS:
        raise BadInput(
            f"{entry.file}: {entry.name} is stored as {entry.dtype}; weights must be stored as one of "
            f"{', '.join(_FLOATS)}: use a checkpoint that is not quantised."
        )
    if entry.shape != param.shape:
        raise BadInput(
            f"{entry.file}: {entry.name} has shape {list(entry.shape)}, the model's config asks for "
            f"{list(param.shape)}: check that config.json belongs to this checkpoint."
        )


def _entries(folder: Path, allow_pickle: bool) -> Mapping[str, tensorfile.Entry]:
    """Every tensor in the folder's checkpoint by name, from the headers."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the folder of a Hugging Face checkpoint.")
    kinds: list[tuple[str, str, Callable[[Path], Mapping[str, tensorfile.Entry]]]]
    kinds = [(SINGLE, INDEX, tensorfile.read_header)]
    if allow_pickle:
        kinds.append((pickled.SINGLE, pickled.INDEX, pickled.read_tensors))
    for single, index, read in kinds:
        if (folder / single).exists():  # what transformers prefers
            return read(folder / single)
        if (folder / index).is_file():
            return _indexed(folder, index, read)
    raise BadInput(_no_weights(folder))


def _indexed(
    folder: Path, index: str, read: Callable[[Path], Mapping[str, tensorfile.Entry]]
) -> Mapping[str, tensorfile.Entry]:
    weight_map = _weight_map(folder / index)
    entries: dict[str, tensorfile.Entry] = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        if not path.is_file():
            raise BadInput(f"{folder / index} names {file_name}, which is not there: download or copy it again.")
        for name, entry in read(path).items():
            if name in entries:
                raise BadInput(
                    f"{path} holds {name}, and so does {entries[name].file.name}; each tensor must be stored once: "
                    "save the checkpoint again."
                )
            entries[name] = entry
    lost = sorted(n for n, f in weight_map.items() if n not in entries or entries[n].file.name != f)
    if lost:
        raise BadInput(f"{folder / index} says that {weight_map[lost[0]]} holds {_listed(lost)}, but it does not.")
    return entries


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not weight_map or not all(Path(f).name == f for f in weight_map.values()):
            raise ValueError("weight_map must map tensor names to names of files in the same folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is not the index of a sharded checkpoint ({error}): copy it again.") from error
    return weight_map


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{folder} holds {_listed(pickles)} but no safetensors; pickled weights can run code and are not read: "
            "convert once with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder), or set "
            "allow_pickle: true, which reads tensors and runs nothing."
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}: give the folder of a complete checkpoint."


def _compare(table: tensorfile.Entry, copy: tensorfile.Entry, numel: int) -> None:
    """The config ties the output projection to the table: then a stored copy must be the same numbers."""
    buffers = [torch.empty(numel * _FLOATS[e.dtype].itemsize, dtype=torch.uint8) for e in (table, copy)]
    for a, b in zip(
        tensorfile.pieces(table, numel, buffers[0]), tensorfile.pieces(copy, numel, buffers[1]), strict=True
    ):
        if not torch.equal(a.to(torch.float32), b.to(torch.float32)):
            raise BadInput(
                f"{copy.file}: {copy.name} differs from {table.name}, but config.json ties them (tie_word_embeddings "
                "is true), so one of the two would be lost: set tie_word_embeddings to false in config.json, or remove "
                f"{copy.name} from the checkpoint."
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
