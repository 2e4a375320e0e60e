"""What the hosts do beside a TPU's program: the buffers that they give it, and the stamps that they write."""

import dataclasses
import re
from collections.abc import Sequence

from tests.tpu.program import Program

__all__ = ["check_buffers_of_hosts", "check_stamps_of_host"]

# What `ConvertToSparseCoreCsrWrappedCooTensor` gives, by number, in the order in which SparseCores take it:
# row pointers, rows in the owner's shard, samples, gains.
_ORDER = [0, 2, 1, 3]


def check_buffers_of_hosts(bridged: str, programs: Sequence[Program], targets: Sequence[str]) -> str:
    """Custom calls take row pointers, rows, samples and gains, in this order, that were made for a stack of their width.

    Returns:
        What one takes instead; "" where all do.
    """
    [program] = programs
    [operands] = re.findall(r'"tf_device\.cluster_func"\(([^)]*)\)', bridged)
    given = operands.split(", ")
    for target in targets:
        for call in program.calls(target):
            sources = [_source(bridged, given[int(name.removeprefix("%arg"))]) for name in call.arguments()[:4]]
            if [source.number for source in sources] != _ORDER or len({source.op for source in sources}) != 1:
                return f"{target} takes {sources} of the hosts' buffers, not {_ORDER} of one"
            if sources[0].width != call.width():
                return f"{target} of width {call.width()} takes buffers of width {sources[0].width}"
    return ""


def check_stamps_of_host(bridged: str, tables: int) -> str:
    """The host is given the number of the update, and the rows of each tracked table, once per step.

    Returns:
        What it is given instead; "" where that holds.
    """
    found = re.findall(r'"tf\.EagerPyFunc"\(.*?\) \{Tin = \[(.*?)\]', bridged)
    wanted = [", ".join(["i32", *["i64"] * tables])] if tables else []
    return "" if found == wanted else f"the host's Python is given {found}, not {wanted}"


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where a buffer comes from.

    Attributes:
        op: the name of its first result; the line of another op than the one that makes the CSR buffers.
        number: which result; -1 of another op.
        width: of the stack that the op works for.
    """

    op: str
    number: int
    width: int = 0


def _source(text: str, value: str) -> _Source:
    """Of what a program is given."""
    name, number = _parts(value)
    line = next(line for line in text.splitlines() if re.match(rf" *(%\w+, )*{name}(:\d+)?[ ,].*= ", line))
    if "tf_device.launch" in line:
        after = text[text.index(line) :]
        returned = re.search(r"tf_device\.return (.*?) : ", after)
        assert returned, "a launch returns"
        return _source(after, returned.group(1).split(", ")[number])
    if "tf.TPUCopyWithDynamicShape" in line:
        operands = re.search(r"\(([^)]*)\)", line)
        assert operands, "an op has operands"
        return _source(text, operands.group(1).split(", ")[number])
    if "tf.ConvertToSparseCoreCsrWrappedCooTensor" not in line:
        return _Source(line.split(" = ")[-1][:60], -1)
    names = [one.strip() for one in line.split(" = ")[0].split(",")]
    width = re.search(r"feature_width = (\d+)", line)
    assert width, "the op has a width"
    return _Source(names[0], number if len(names) == 1 else names.index(name), int(width.group(1)))


def _parts(value: str) -> tuple[str, int]:
    name, _, number = value.partition("#")
    return name, int(number or 0)
