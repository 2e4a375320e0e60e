"""Random calls of a library of native/src/lookup.c: python -m tests.unit.native.fuzz LIBRARY SEED SECONDS. Prints how many.

Memory is allocated by malloc to the byte, so that the address sanitizer finds each read and write outside.
"""

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tpuembed.native.lookup as native

Array = npt.NDArray[Any]
ITEM = (4, 2, 2, 1)  # bytes of an element, by storage


def _bytes(random: np.random.Generator, count: int) -> Array:
    return random.integers(0, 256, count, np.uint8)


def feature(random: np.random.Generator, kept: list[Array]) -> native._Feature:
    """Return a feature of random tables, with a consistent or a damaged overlay."""
    storage, dim = int(random.integers(4)), int(random.choice([1, 2, 3, 7, 16, 31, 64, 65, 200, 257, 300]))
    row_bytes = dim * ITEM[storage] + 8 * (storage == 3)
    rows, offset = int(random.integers(1, 200)), int(random.integers(0, 100))
    is_overlaid = bool(random.integers(2))
    kept.append(_bytes(random, (offset + rows) * row_bytes))
    made = native._Feature(
        rows=kept[-1].ctypes.data,
        storage=storage,
        dim=dim,
        row_bytes=row_bytes,
        ids=rows,
        row_offset=offset,
        kind=int(random.integers(3)),
        combiner=int(random.integers(3)),
        length=int(random.integers(1, 6)),
        policy=int(random.integers(3)),
        policy_row=int(random.integers(rows)),
        divides_weights=int(random.integers(2)),
    )
    if is_overlaid:
        count = int(random.integers(1, 50))
        words = _bytes(random, 8 * -(-(offset + rows) // 32)).view(np.int32)
        words[1::2] = random.integers(-5, count + 5, len(words) // 2)  # the upper halves
        overlay = _bytes(random, count * row_bytes), words
        kept += overlay
        made.overlay, made.words = (array.ctypes.data for array in overlay)
        made.overlay_rows = count
    return made


def call(library: ctypes.CDLL, random: np.random.Generator) -> int:
    """Make one random call, and return its code."""
    kept: list[Array] = []
    features = [feature(random, kept) for _ in range(int(random.integers(1, 5)))]
    structs = (native._Feature * len(features))(*features)
    inputs, batch = np.zeros(len(features), native._INPUT), int(random.integers(0, 20))
    for index, one in enumerate(features):
        hot = 1 if one.kind == 0 else int(random.integers(0, 9))
        ids = random.integers(0, one.ids, (batch, hot))
        if one.kind:
            ids[random.random(ids.shape) < 0.3] = -1
        if random.random() < 0.7 or one.policy:
            ids[random.random(ids.shape) < 0.1] = random.choice([-(2**63), -2, 2**63 - 1, -1, one.ids])
        out = np.empty((batch, one.dim * (one.length if one.kind == 2 else 1)), np.float32)
        kept += [ids, out]
        inputs[index] = (ids.ctypes.data, hot, hot, 0, 0, out.ctypes.data, out.shape[1])
        if one.kind == 1 and random.random() < 0.5:
            kept.append(random.normal(size=ids.shape).astype(np.float32))
            inputs["weights"][index], inputs["weight_stride"][index] = kept[-1].ctypes.data, hot
    variant = int(random.integers(library.tpuembed_best_variant() + 1))
    begin = int(random.integers(0, batch + 1))
    # Pages of 64 bytes, so that the overlay's words and rows have several; the kernel refuses their addresses.
    recent = np.zeros(1 << 8, np.uint64)
    pages = native._Pages(recent.ctypes.data, 8, 64)
    library.tpuembed_read_ahead(
        ctypes.addressof(pages), ctypes.addressof(structs), inputs.ctypes.data, len(features), begin, batch
    )
    advised = recent[recent > 0].astype(np.int64) * 64
    memory = [(array.ctypes.data // 64 * 64, array.ctypes.data + array.nbytes) for array in kept]
    assert all(any(start <= page < stop for start, stop in memory) for page in advised.tolist())
    arguments = variant, ctypes.addressof(structs), inputs.ctypes.data, len(features)
    code: int = library.tpuembed_look_up(*arguments, begin, batch)
    place = native._Place()
    found = [
        library.tpuembed_find_outside(
            ctypes.addressof(structs) + index * ctypes.sizeof(native._Feature),
            inputs.ctypes.data + index * native._INPUT.itemsize,
            batch,
            ctypes.addressof(place),
        )
        for index in range(len(features))
    ]
    assert code != 1 or any(found)
    assert begin or batch == 0 or (code == 1) == any(found)
    return code


def find_names(library: ctypes.CDLL, random: np.random.Generator) -> None:
    """Find random names in a random index: all rows are written, and no other byte."""
    buckets, count, salt_bytes = (
        int(random.integers(1, 60)),
        int(random.integers(0, 200)),
        int(random.choice([0, 0, 3])),
    )
    few = int(random.choice([2, 100, 2**62]))
    keys, numbers = random.integers(-few, few, (buckets, 4)), random.integers(-3, 2**31, (buckets, 4)).astype(np.int32)
    is_text = bool(random.integers(2))
    lengths = random.integers(0, random.choice([2, 9, 40, 300]), count)
    content = _bytes(random, count * salt_bytes + int(lengths.sum()))
    values = lengths if is_text else random.choice([-(2**63), 2**63 - 1, -1, 0, *random.integers(-few, few, 50)], count)
    rows, recent = np.full(count, -77, np.int64), np.zeros(1 << 8, np.uint64)
    struct = native._Names(
        keys=keys.ctypes.data,
        numbers=numbers.ctypes.data,
        buckets=buckets,
        oov_buckets=int(random.choice([0, 0, 1, 3, 2**63 - 1])),
        salt_bytes=salt_bytes if is_text else 0,
        padded=int(random.integers(2)),
    )
    pages = native._Pages(recent.ctypes.data, 8, 64)
    unknown = library.tpuembed_find_names(
        ctypes.addressof(pages) if random.integers(2) else None,
        ctypes.addressof(struct),
        ctypes.cast(content.ctypes.data, ctypes.c_char_p) if is_text else None,
        values.ctypes.data,
        count,
        rows.ctypes.data,
    )
    assert (rows != -77).all()
    nowhere = np.flatnonzero(rows == 1 << 62)
    assert unknown == (nowhere[0] if len(nowhere) else -1)


def main() -> None:
    native._LIBRARY = Path(sys.argv[1])  # type: ignore[misc]
    library = native.load_library()
    assert not isinstance(library, str), library
    random, stop = np.random.default_rng(int(sys.argv[2])), time.monotonic() + float(sys.argv[3])
    codes: set[int] = set()
    calls = 0
    while time.monotonic() < stop:
        codes.add(call(library, random))
        find_names(library, random)
        calls += 1
    assert codes == {0, 1, 2}, codes
    print(calls)


if __name__ == "__main__":
    main()
