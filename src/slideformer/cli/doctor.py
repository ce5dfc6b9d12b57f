"""slideformer doctor"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slideformer.cli.arguments import Debug, Json
from slideformer.cli.exits import told_in_one_sentence

if TYPE_CHECKING:
    from slideformer.device import Device

WIDTH = 80
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
OffloadDir = Annotated[
    Path | None, typer.Option("--offload-dir", help="Measure the disk that this folder is on, or would be.")
]


def doctor(
    device: DeviceName = "auto", offload_dir: OffloadDir = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Show what is installed, what this machine can do, and how fast it is at it. Takes some seconds."""
    with told_in_one_sentence(debug=debug, as_json=as_json):
        facts = dict(_examine(device, offload_dir))
        print(json.dumps(facts, indent=2) if as_json else _text(facts))


def _examine(name: str, offload_dir: Path | None) -> Iterator[tuple[str, object]]:
    """Facts by name, in the order of the report. Rates are per second."""
    from slideformer.device import open_device
    from slideformer.engine.rates import update_rate
    from slideformer.kernels.device_update import implementation
    from slideformer.memory import host_limit
    from slideformer.model.elementwise import families_by_op
    from slideformer.native import TorchKernels, load
    from slideformer.train.hardware import gpus
    from slideformer.train.measure import link_speed, page_lock_rate
    from slideformer.train.record import versions

    yield "versions", dict(versions())
    kernels = load()
    yield "native_library", not isinstance(kernels, TorchKernels)
    yield "instruction_set", kernels.isa
    yield "update_threads", kernels.threads
    yield "update_gparams", update_rate(kernels) / 1e9
    kernels.close()
    limit = host_limit()
    yield "host_memory_gib", limit.nbytes / 2**30
    yield "host_memory_limit_of", limit.name
    yield "gpus", gpus()
    with open_device(name) as device:
        yield "device", device.kind
        yield "device_update", implementation(device.torch_device)
        yield "kernels", families_by_op(device.torch_device)
        rate = page_lock_rate(device) if device.kind != "cpu" else None
        yield "page_lock_gib_at_once", None if device.kind == "cpu" else rate is not None
        yield "page_lock_gbps", rate and rate / 1e9
        link = link_speed(device)
        yield "upload_gbps", link.upload / 1e9
        yield "download_gbps", link.download / 1e9
        yield "both_ways_gbps", link.both / 1e9
        yield "disk", _disk(offload_dir, device)


def _disk(offload_dir: Path | None, device: Device) -> dict[str, object] | None:
    """Of the file system under a folder, which need not be there; in a folder of its own that is removed again."""
    if offload_dir is None:
        return None
    from slideformer.errors import BadInput
    from slideformer.memory import DiskFolder, disk_rates, free_nbytes
    from slideformer.memory.disk_claim import is_a_file

    if offload_dir.exists() and not offload_dir.is_dir():
        raise BadInput(is_a_file(offload_dir))
    there = next(path for path in (offload_dir.absolute(), *offload_dir.absolute().parents) if path.is_dir())
    try:
        inside = Path(tempfile.mkdtemp(prefix="slideformer-doctor-", dir=there))
    except OSError as error:
        raise BadInput(f"offload_dir {there} cannot be written to: {error.strerror}: choose another") from None
    try:
        with DiskFolder(inside) as folder:
            rates = disk_rates(folder)
            facts: dict[str, object] = {f"{w}_gbps": r / 1e9 for w, r in dataclasses.asdict(rates).items()}
            facts |= {"folder": str(there), "direct": folder.direct, "free_gib": free_nbytes(there) / 2**30}
        return facts | _gds(inside, device)
    finally:
        inside.rmdir()


def _gds(inside: Path, device: Device) -> dict[str, object]:
    """How the disk and the GPU would move data, and how fast where there is one; None without kvikio."""
    import torch

    from slideformer.errors import BadInput, DoesNotFit
    from slideformer.memory import DiskFault, DiskFolder, disk_rates
    from slideformer.memory.disk_gds import Gds
    from slideformer.memory.disk_rates import EXTENT_NBYTES

    try:
        way = "real" if Gds(threads=1, block_nbytes=1 << 20).real else "emulated through host memory"
    except BadInput:
        return {"gds": None}
    if device.kind == "cpu":
        return {"gds": way}
    try:
        with DiskFolder(inside, gds=True) as folder:
            rates = disk_rates(folder, memory=lambda: device.empty(EXTENT_NBYTES, torch.uint8))
    except (BadInput, DiskFault, DoesNotFit, OSError) as error:  # the rest of the report is as good without it
        return {"gds": f"{way}, but it could not be measured ({error})"}
    return {"gds": way, "gds_read_gbps": rates.read / 1e9, "gds_write_gbps": rates.write / 1e9}


def _blocks(kernels: object) -> str:
    assert isinstance(kernels, dict)
    if not kernels:
        return "the model's own code"
    return "triton, " + ", ".join(f"{op} ({' '.join(families)})" for op, families in kernels.items())


def _text(facts: dict[str, object]) -> str:
    versions = facts["versions"]
    assert isinstance(versions, dict)
    native = "native" if facts["native_library"] else "torch stand-in: see the warning above"
    on_cpu = facts["device"] == "cpu"
    copies = "copies within the host, each way" if on_cpu else "page-locked copies, each way"
    locking = {
        None: "not needed on the CPU",
        True: f"1 GiB at {facts['page_lock_gbps'] or 0:.1f} GB/s",
        False: "refused",
    }
    gpus = facts["gpus"]
    assert isinstance(gpus, list)
    rows = [
        ("installed", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("optimizer", f"{native}, {facts['instruction_set']}, {facts['update_threads']} threads"),
        ("update rate", f"{facts['update_gparams']:.3g} G parameters/s"),
        ("host memory", f"{facts['host_memory_gib']:.1f} GiB of {facts['host_memory_limit_of']}"),
        ("GPU", "; ".join(gpus) or "none found"),
        (
            "trains on",
            str(facts["device"]) + (", though there is a GPU: this torch cannot use it" if gpus and on_cpu else ""),
        ),
        ("kernels", f"update on the device: {facts['device_update']}; blocks: {_blocks(facts['kernels'])}"),
        ("page-locking", locking[facts["page_lock_gib_at_once"]]),
        (
            "link",
            f"{facts['upload_gbps']:.1f} up, {facts['download_gbps']:.1f} down, "
            + f"{facts['both_ways_gbps']:.1f} both at once GB/s ({copies})",
        ),
    ]
    if isinstance(disk := facts["disk"], dict):
        way = "direct I/O" if disk["direct"] else "through the page cache: no direct I/O here"
        told = f"{disk['read_gbps']:.2f} read, {disk['write_gbps']:.2f} written, both at once "
        told += f"{disk['both_read_gbps']:.2f} and {disk['both_write_gbps']:.2f} GB/s ({way}); "
        told += f"{disk['free_gib']:.0f} GiB free at {disk['folder']}; "
        told += f"GPUDirect Storage: {disk['gds'] or 'needs kvikio'}"
        if "gds_read_gbps" in disk:
            told += f", {disk['gds_read_gbps']:.2f} read, {disk['gds_write_gbps']:.2f} written"
        rows.append(("disk", told))
    return "\n".join(
        textwrap.fill(value, WIDTH, initial_indent=f"{name:<13} ", subsequent_indent=" " * 14) for name, value in rows
    )
