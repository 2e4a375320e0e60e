"""The pages that a lookup advises are those that it touches, in numpy's count and in the kernel's, and values stay the same."""

import ctypes
import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.export.fakes import write_checkpoint
from tests.support.export.in_process import exports_in_this_process
from tests.support.export.lookups import Case, request, write
from tpuembed import export_saved_model
from tpuembed.errors import ConfigError
from tpuembed.manifest import Manifest
from tpuembed.native import lookup as native_lookup
from tpuembed.native.lookup import NativeLookups, available

pytestmark = [
    pytest.mark.skipif(bool(available()), reason=f"native/src/lookup.c is not compiled: {available()}"),
]

Array = npt.NDArray[Any]
PAGE = 8
"""Bytes of a page in tests: small tables have several, and rows lie across them. The kernel refuses such addresses."""
EXPORTS = [("int8", True)]
OTHERS = [("float32", False), ("int8", False), ("float32", True)]


@pytest.fixture(
    scope="module",
    params=[*EXPORTS, *(pytest.param(one, marks=pytest.mark.nightly) for one in OTHERS)],
    ids=lambda one: f"{one[0]}{'-overlay' * one[1]}",
)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    storage, overlay = request.param
    with exports_in_this_process():
        return write(tmp_path_factory.mktemp("export"), storage, weighted=True, overlay=overlay, tables="ac")


def touched(case: Case, native: NativeLookups, inputs: Mapping[str, Array]) -> set[int]:
    """Return the numbers of the pages that a lookup of `inputs` touches."""
    pages: set[int] = set()
    manifest = case.manifest
    tables = {one.name: one for one in manifest.tables}
    stacks = {one.name: one for one in manifest.stacks}
    for feature in manifest.features:
        table = tables[feature.table]
        stack, policy = stacks[table.stack], feature.out_of_vocabulary
        arrays = [native._arrays[array.name] for array in stack.arrays]
        ids = inputs[feature.name]
        if feature.input != "id":
            ids = ids[:, : feature.max_sequence_length or None]
            ids = ids[ids != -1]
        inside = (ids >= 0) & (ids < table.rows)
        found = ids[inside] if isinstance(policy, str) else np.where(inside, ids, policy)
        rows = np.unique(found)
        spans = []
        if len(arrays) > 1:
            words = table.row_offset + rows
            spans.append((arrays[2].ctypes.data + words // 32 * 8, 8))
            bits = np.unpackbits(arrays[2].view(np.uint32)[::2].copy().view(np.uint8), bitorder="little")
            ranks = np.cumsum(bits, dtype=np.int64) - bits  # rows of the overlay before each row
            changed = bits[words].astype(bool)
            spans.append((arrays[1].ctypes.data + ranks[words[changed]] * stack.row_bytes, stack.row_bytes))
            own = table.row_offset + rows[~changed]
        else:
            own = table.row_offset + rows
        spans.append((arrays[0].ctypes.data + own * stack.row_bytes, stack.row_bytes))
        for starts, size in spans:
            for start in starts.tolist():
                pages |= set(range(start // PAGE, (start + size - 1) // PAGE + 1))
    return pages


def reading_ahead(case: Case, **options: Any) -> NativeLookups:
    native = NativeLookups(case.manifest, case.path, **{"threads": 1, **options})
    native.reads_ahead = True
    return native


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("batch", "hot"), [(0, 3), (1, 0), (1, 1), (2, 3), (3, 9), (6, 30)])
def test_the_pages_are_those_that_the_lookup_touches(case: Case, seed: int, batch: int, hot: int) -> None:
    native = reading_ahead(case)
    native._pages.page_bytes = PAGE
    inputs = request(case, np.random.default_rng(seed), batch, hot)
    native.named(inputs)
    advised = set(native._recent[native._recent > 0].tolist())
    expected = touched(case, native, inputs)
    assert advised <= expected
    places = {(page * 0x9E3779B97F4A7C15 % 2**64) >> (64 - native_lookup._RECENT_BITS) for page in expected}
    assert len(advised) == len(places), "a page may be missing only where another one took its place"
    assert len(places) >= 0.9 * len(expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("at_once", [1, 50, 1 << 14])
def test_values_and_errors_are_those_without(
    case: Case, monkeypatch: pytest.MonkeyPatch, threads: int, at_once: int
) -> None:
    monkeypatch.setattr(native_lookup, "_AHEAD_IDS", at_once)
    monkeypatch.setattr(native_lookup, "_THREADED_BYTES", 100)
    plain, ahead = NativeLookups(case.manifest, case.path, threads=1), reading_ahead(case, threads=threads)
    for batch in (0, 1, 2, 37):
        inputs = request(case, np.random.default_rng(batch), batch, 5)
        for name, value in ahead.named(inputs).items():
            np.testing.assert_array_equal(value, plain.named(inputs)[name])
    for bad in (-(2**63), 2**63 - 1, -5):
        inputs["a_error_list"] = np.full((37, 3), bad)
        with pytest.raises(ConfigError) as raised:
            ahead.named(inputs)
        with pytest.raises(ConfigError) as without:
            plain.named(inputs)
        assert str(raised.value) == str(without.value)


def resident(mapped: Array) -> Array:
    """Return which pages of a mapping are in the page cache."""
    found = np.zeros(-(-mapped.nbytes // mmap.PAGESIZE), np.uint8)
    address, size = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes)
    assert ctypes.CDLL(None, use_errno=True).mincore(address, size, ctypes.c_void_p(found.ctypes.data)) == 0
    return (found & 1).astype(bool)


def drop(path: Path) -> None:
    """Drop the pages of a file that no process has touched in a mapping."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise")
def test_the_kernel_reads_all_pages_of_a_request_and_no_others(tmp_path: Path) -> None:
    rows, dim = 40_000, 65  # rows of 73 bytes, which lie across pages
    write_checkpoint(tmp_path / "ckpt", {"t": np.random.default_rng(0).normal(size=(rows, dim)).astype(np.float32)})
    config = {"features": {"x": {"table": "t", "combiner": "sum"}}}
    with exports_in_this_process():
        version = export_saved_model(
            tmp_path / "ckpt", tmp_path / "m", serving_config=config, layout="mmap", storage="int8"
        ).path
    manifest = Manifest.read(version)
    assert manifest is not None
    native = NativeLookups(manifest, version, threads=1)
    [mapped], [stack] = native._arrays.values(), manifest.stacks
    drop(version / stack.file)
    if resident(mapped).any():
        pytest.skip("the file system of the test does not drop pages")
    ids = np.random.default_rng(1).integers(0, rows, (4, 30))
    calls = native._template.copy()
    calls[0] = (ids.ctypes.data, 30, 30, 0, 0, 0, dim)
    native._library.tpuembed_read_ahead(
        ctypes.addressof(native._pages), ctypes.addressof(native._structs), calls.ctypes.data, 1, 0, 4
    )
    first = ids.ravel() * stack.row_bytes
    pages = {*(first // mmap.PAGESIZE).tolist(), *((first + stack.row_bytes - 1) // mmap.PAGESIZE).tolist()}
    assert len(pages) > len({*(first // mmap.PAGESIZE).tolist()}), "some rows lie across pages"
    deadline = time.monotonic() + 10
    while set(np.flatnonzero(resident(mapped)).tolist()) != pages and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(np.flatnonzero(resident(mapped)).tolist()) == pages
