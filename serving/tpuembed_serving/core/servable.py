"""What the server knows of a loaded SavedModel: its signatures, and that it runs. No TensorFlow here."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from tpuembed_serving.batching.parameters import BatchingParameters

__all__ = ["Array", "Columns", "IdRange", "Merging", "Servable", "Signature", "TensorInfo"]

Array = npt.NDArray[Any]


class Columns(Sequence[Array]):
    """Inputs that are the columns of one matrix, int64 [rows, inputs]: what would be done to each is done to the matrix."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: Array) -> None:
        self.matrix = matrix

    def __len__(self) -> int:
        return int(self.matrix.shape[1])

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        return self.matrix.T[index] if isinstance(index, int) else list(self.matrix.T[index])

    def __iter__(self) -> Iterator[Array]:
        return iter(self.matrix.T)


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """An input or output of a signature.

    Attributes:
        alias: what requests and responses call it.
        tensor: the tensor's name in the graph.
        dtype: as TensorFlow's C++ names it: "float", "int64", "string".
        numpy_dtype: of the arrays that carry it; None where numpy has none.
    """

    alias: str
    tensor: str
    dtype: str
    numpy_dtype: np.dtype[Any] | None


@dataclasses.dataclass(frozen=True)
class Signature:
    """A named function of a SavedModel; inputs and outputs sorted by alias.

    Attributes:
        padding: by input, what fills rows of different lengths up; None where they are refused. Empty where all are.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    padding: tuple[int | float | str | None, ...] = ()

    @functools.cached_property
    def output_dtypes(self) -> Mapping[str, str]:
        """By alias."""
        return {info.alias: info.dtype for info in self.outputs}

    @functools.cached_property
    def int64_row(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]] | None:
        """The values of a row by alias, in order, where there are several inputs and all are int64; else None."""
        aliases = [info.alias for info in self.inputs]
        if len(aliases) < 2 or any(info.dtype != "int64" for info in self.inputs):
            return None
        return operator.itemgetter(*aliases)


@dataclasses.dataclass(frozen=True)
class IdRange:
    """The ids that an input may hold: from `start` up to and without `stop`."""

    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merging:
    """How requests of one signature may share a run: rows of all inputs behind each other, and the outputs' rows taken apart.

    Attributes:
        is_proven: whether the graph proves that a row of the outputs depends on the same row of the inputs alone, where all
            inputs have the ranks and sizes of `shapes`.
        shapes: by input, in the signature's order, its sizes but the first; -1 is any size, and None any rank.
        is_steady: whether the time of a run depends on the shapes of its inputs alone.
        padding: by input, in the signature's order, what may stand behind the values of a row without a change of the result;
            None where nothing may. Empty where that is so of every input.
        id_ranges: by input, the ids that do not fail the run; None where any value is accepted. Empty where it is not known.
        parameters: of this model alone.
    """

    is_proven: bool = False
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    is_steady: bool = False
    padding: tuple[int | None, ...] = ()
    id_ranges: tuple[IdRange | None, ...] = ()
    parameters: BatchingParameters | None = None


class Servable(Protocol):
    """One loaded version of a model.

    Attributes:
        signatures: by name.
        signature_defs: the same as the JSON form of TensorFlow's SignatureDef, for metadata.
    """

    signatures: Mapping[str, Signature]
    signature_defs: Mapping[str, Any]

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        """The signature's outputs for `inputs`, both in the signature's order; safe to call from several threads.

        Raises:
            StatusError: with TensorFlow's code and message.
        """

    def merging(self, signature: Signature) -> Merging | None:
        """How requests of `signature` may share a run; None where they may not."""

    def close(self) -> None:
        """Free its memory; nothing runs it any more."""
