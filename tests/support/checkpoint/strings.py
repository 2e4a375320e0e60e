"""String tensors of bundles, written for tests."""

from collections.abc import Sequence

from tpuembed.formats.protobuf import varint
from tpuembed.formats.tensor_bundle import crc


def encode_strings(values: Sequence[bytes]) -> tuple[bytes, int]:
    """Return (bytes in the data file, unmasked CRC32C) of a string tensor of `values`; see `formats.tensor_bundle.strings`."""
    lengths_crc = crc.value(b"".join(len(value).to_bytes(4, "little") for value in values))
    checksum = crc.mask(lengths_crc).to_bytes(4, "little")
    text = b"".join(values)
    payload = b"".join(varint(len(value)) for value in values) + checksum + text
    return payload, crc.extend(crc.extend(lengths_crc, checksum), text)
