"""slideformer export"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slideformer.cli.arguments import Debug, Json
from slideformer.cli.exits import told_in_one_sentence

if TYPE_CHECKING:
    import torch

    from slideformer.train.save import Saved

FolderFrom = Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint, a run's output_dir, or a model.")]
FolderTo = Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write.")]
Dtype = Annotated[str, typer.Option(help="auto (as the run's save_dtype says), bfloat16 or float32.")]
ShardSize = Annotated[str, typer.Option("--max-shard-size", help="Of one file of weights, as in 5GB or 500MiB.")]
Model = Annotated[Path | None, typer.Option(help="The model the run started from, if it has moved.")]
Push = Annotated[bool, typer.Option("--push-to-hub", help="Publish it on the Hugging Face hub.")]
HubId = Annotated[
    str | None, typer.Option("--hub-model-id", help="NAME or ORGANISATION/NAME; TARGET's name if left out.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Write into a folder with other files; those of the same name are replaced.")
]
Public = Annotated[bool, typer.Option("--public", help="A repository that is made is private without this.")]


def export(
    source: FolderFrom,
    target: FolderTo,
    dtype: Dtype = "auto",
    max_shard_size: ShardSize = "5GB",
    model: Model = None,
    push_to_hub: Push = False,
    hub_model_id: HubId = None,
    public: Public = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint or a model as a Hugging Face folder that from_pretrained loads, and read it back.

    With it go tokenizer, chat template, generation settings and a model card with the facts of the run. A folder that
    has other files than an earlier export's is left alone.
    """
    with told_in_one_sentence(debug=debug, as_json=as_json):
        shard_nbytes, wanted = _nbytes(max_shard_size), _dtype(dtype)
        from slideformer.train import export as exporting
        from slideformer.train.hub import push, require_hub

        repo_id = hub_model_id or target.resolve().name
        if push_to_hub:
            require_hub(repo_id)
        found = exporting.find_source(source, model)
        saved = exporting.export(found, target, dtype=wanted, max_shard_nbytes=shard_nbytes, overwrite=overwrite)
        address = push(target, saved.names, repo_id, private=not public) if push_to_hub else None
        command = exporting.gguf_command(target, wanted or found.dtype)
        print(_json(found.folder, saved, address, command) if as_json else _text(found.folder, saved, address, command))


def _dtype(name: str) -> torch.dtype | None:
    from slideformer.errors import BadInput

    if name not in ("auto", "bfloat16", "bf16", "float32", "fp32"):
        raise BadInput(f"--dtype is {name!r}, must be auto, bfloat16 or float32")
    if name == "auto":
        return None
    import torch

    return torch.bfloat16 if name in ("bfloat16", "bf16") else torch.float32


def _nbytes(text: str) -> int:
    from slideformer.config import SIZE_UNITS
    from slideformer.errors import BadInput

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise BadInput(f"--max-shard-size is {text!r}, which is no size: write 5GB (or MiB, GiB, MB)")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def _text(source: Path, saved: Saved, address: str | None, command: str) -> str:
    total = sum(one.nbytes for one in saved.sums.values())
    lines = [
        f"{source} is in {saved.folder}: {total / 1e9:.2f} GB in {len(saved.sums)} files, read back as written",
        *(f"  {name}  {one.nbytes} bytes  crc32 {one.crc32:08x}" for name, one in saved.sums.items()),
    ]
    if address is not None:
        lines.append(f"pushed to {address}")
    return "\n".join([*lines, "for llama.cpp:", f"  {command}"])


def _json(source: Path, saved: Saved, address: str | None, command: str) -> str:
    weights = {name: {"nbytes": one.nbytes, "crc32": f"{one.crc32:08x}"} for name, one in saved.sums.items()}
    return json.dumps(
        {
            "source": str(source),
            "folder": str(saved.folder),
            "files": sorted(saved.names),
            "weights": weights,
            "hub": address,
            "gguf_command": command,
        },
        indent=2,
    )
