"""The checksum finds what a disk gets wrong, is the same in C++, and adds up; headers say what is different."""

from __future__ import annotations

import random

import pytest

from memory.pages import noise
from slideformer.memory.disk_extent import PAGE, checksum, difference, header, padded
from slideformer.memory.disk_gds import PIECE_NBYTES, device_checksum
from slideformer.native import NativeKernels, load

RUN, DIGEST = bytes(range(16)), bytes(range(16, 32))


def pages(num: int, seed: int) -> bytearray:
    return bytearray(noise(num * PAGE, seed).numpy())


@pytest.mark.parametrize("num", [0, 1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("first", [0, 5, 2**40])
def test_the_native_sum_is_the_specification(num: int, first: int) -> None:
    data = noise(num * PAGE, num)
    with load(1) as kernels:
        assert isinstance(kernels, NativeKernels)
        native = kernels._library.sf_checksum(data.data_ptr(), num, first)
    assert native == checksum(memoryview(data.numpy()), first)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, PIECE_NBYTES, PIECE_NBYTES + 3 * PAGE + 5])
@pytest.mark.parametrize("off", [0, 1])
def test_the_devices_sum_is_the_specification(nbytes: int, off: int) -> None:
    """Tried on the CPU; tests/gpu/test_gds.py tries it on a GPU."""
    data = noise(nbytes, nbytes % 97, off=off)
    whole = bytes(data.numpy()).ljust(padded(nbytes), b"\0")
    assert device_checksum(data) == checksum(memoryview(whole), 0)
    if nbytes > 1:
        assert device_checksum(data.flip(0)) != device_checksum(data)


def test_sums_of_parts_add_up() -> None:
    whole = memoryview(pages(100, 0))
    parts = [checksum(whole[a * PAGE : b * PAGE], 7 + a) for a, b in ((0, 1), (1, 65), (65, 100))]
    assert sum(parts) % 2**64 == checksum(whole, 7)


def test_every_kind_of_change_shows() -> None:
    data = pages(3, 1)
    expected = checksum(memoryview(data), 0)

    def changed(*spans: tuple[int, bytes]) -> int:
        other = bytearray(data)
        for start, new in spans:
            other[start : start + len(new)] = new
        assert other != data
        return checksum(memoryview(other), 0)

    chance = random.Random(0)
    flips = [(at := chance.randrange(len(data)), bytes([data[at] ^ 1 << chance.randrange(8)])) for _ in range(2000)]
    sums = [changed(flip) for flip in flips]
    top = [(8 * i + 7, bytes([data[8 * i + 7] ^ 0x80])) for i in (3, 9)]  # a sum of products alone would miss the pair
    sums.append(changed(*top))
    sums.append(changed((0, data[8:16]), (8, data[:8])))
    sums.append(changed((0, data[4:8]), (4, data[:4])))
    sums.append(changed((0, data[PAGE : 2 * PAGE]), (PAGE, data[:PAGE])))
    sums.append(changed((PAGE, bytes(PAGE))))
    sums.append(changed((2 * PAGE, data[:PAGE])))
    assert expected not in sums
    assert checksum(memoryview(data), 1) != expected and checksum(memoryview(bytes(PAGE)), 0) != 0


def test_a_header_says_what_is_different() -> None:
    expected = header(RUN, DIGEST, 3, 7, 1000)
    assert len(expected) == PAGE and difference(expected, expected) is None
    told = {
        "there are zeros where its header was": bytes(PAGE),
        "its header was overwritten": noise(PAGE, 0).numpy().tobytes(),
        "it was written by another run": header(DIGEST, DIGEST, 3, 7, 1000),
        "another extent's data is in its place": header(RUN, DIGEST, 2, 7, 1000),
        "it holds write 6 where write 7 was the last: a write was lost, or undone": header(RUN, DIGEST, 3, 6, 1000),
        "its header was changed": header(RUN, DIGEST, 3, 7, 999),
    }
    for text, found in told.items():
        assert difference(found, expected) == text
    assert difference(header(RUN, RUN, 3, 7, 1000), expected) == "another extent's data is in its place"
    assert difference(expected[:-1] + b"\1", expected) == "its header was changed"
    assert difference(expected[:50] + b"\1" + expected[51:], expected) == "its header was overwritten"
