"""The interface of a loaded SavedModel: its signatures, and how to run them. This module does not import TensorFlow."""

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from tpuembed.files import FilePath
from tpuembed_serving.core.request_record import RequestLogging
from tpuembed_serving.core.status import StatusError, invalid_argument

__all__ = [
    "Array",
    "Columns",
    "IdCheck",
    "LoadedVersion",
    "Merging",
    "Servable",
    "Signature",
    "State",
    "TensorInfo",
    "VersionProgress",
    "VersionStatus",
    "cannot_hold",
]

Array = npt.NDArray[Any]


def cannot_hold(name: str, kind: str, value: float | str, dtype: npt.DTypeLike) -> StatusError:
    """Return the error of a number of input `name` that its integer type cannot hold. `kind` is the type in the API's words."""
    limits = np.iinfo(dtype)
    return invalid_argument(
        f"Input {name} is {kind}, which cannot hold {value}. Send integers from {limits.min} to {limits.max}."
    )


class Columns(Sequence[Array]):
    """Inputs that are the columns of one matrix, int64 [rows, inputs]. Operations on all inputs can use the matrix."""

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
        alias: its name in requests and responses.
        tensor: the tensor's name in the graph.
        dtype: its name in TensorFlow's C++: "float", "int64", "string".
        numpy_dtype: the dtype of its arrays; None if numpy has none.
    """

    alias: str
    tensor: str
    dtype: str
    numpy_dtype: np.dtype[Any] | None


class IdCheck(Protocol):
    """Finds ids outside their tables before a run."""

    def may_be_outside(self, inputs: Sequence[Array]) -> bool:
        """Return False if no id is outside. Takes the inputs of one or several requests."""

    def error(self, inputs: Sequence[Array]) -> StatusError | None:
        """Return the error of the inputs of one request. None if no id is outside."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """A named function of a SavedModel. Its inputs and outputs are sorted by alias.

    Attributes:
        padding: by input, the value that fills up rows of different lengths; None if they are refused. Empty if all are.
        shapes: by input, the shape that every request must have; -1 is any size, and None any shape. Empty if the graph decides.
        ids: finds ids that fail a run before it; None if the accepted ids are not known.
        row_bytes: the bytes of the outputs per row of the inputs, as far as the signature says.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    padding: tuple[int | float | str | None, ...] = ()
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    ids: IdCheck | None = dataclasses.field(default=None, compare=False)
    row_bytes: int = 0

    def check_shapes(self, inputs: Sequence[Array]) -> None:
        """Check the shapes of `inputs`, if the signature requires any.

        Raises:
            StatusError: INVALID_ARGUMENT, an input has another rank or size.
        """
        if not self.shapes or (type(inputs) is Columns and self._takes_vectors):
            return
        shapes = [array.shape for array in inputs]
        for shape, (rank, sizes) in zip(shapes, self._ranks, strict=True):
            if len(shape) != rank or (sizes and any(shape[axis] != size for axis, size in sizes)):
                break
        else:
            return
        for info, shape, wanted in zip(self.inputs, shapes, self.shapes, strict=True):
            if wanted is not None and not (
                len(shape) == len(wanted) and all(want in (-1, size) for want, size in zip(wanted, shape, strict=True))
            ):
                raise invalid_argument(
                    f"input {info.alias} has shape {list(shape)}. The signature takes {list(wanted)}, where -1 is any size"
                )

    @functools.cached_property
    def _ranks(self) -> list[tuple[int | None, list[tuple[int, int]]]]:
        """Return the rank of each input, and its fixed sizes by axis."""
        return [
            (None, [])
            if shape is None
            else (len(shape), [(axis, size) for axis, size in enumerate(shape) if size >= 0])
            for shape in self.shapes
        ]

    @functools.cached_property
    def _takes_vectors(self) -> bool:
        """Returns True if every input may have the shape of a column: one dimension of any size."""
        return all(shape is None or list(shape) == [-1] for shape in self.shapes)

    @functools.cached_property
    def output_dtypes(self) -> Mapping[str, str]:
        """Return the dtype of each output by its alias."""
        return {info.alias: info.dtype for info in self.outputs}

    @functools.cached_property
    def is_int64(self) -> bool:
        """Returns True if there are several inputs, all int64."""
        return len(self.inputs) > 1 and all(info.dtype == "int64" for info in self.inputs)

    @functools.cached_property
    def int64_row(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]] | None:
        """Return a function that extracts the ordered values of a row. None unless there are several inputs, all int64."""
        return operator.itemgetter(*[info.alias for info in self.inputs]) if self.is_int64 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merging:
    """The batching rules of one signature. Inputs are concatenated by rows, and the rows of outputs are split again.

    Attributes:
        is_proven: whether the graph proves that rows are independent, if all inputs have the ranks and sizes of `shapes`.
            Rows are independent if a row of the outputs depends only on the same row of the inputs.
        shapes: by input, in the signature's order, its sizes without the first; -1 is any size, and None any rank.
        is_steady: whether the duration of a run depends only on the shapes of its inputs.
        padding: by input, in the signature's order, the value that may follow a row's values without changing the result;
            None if no value may. Empty if no input can be padded.
    """

    is_proven: bool = False
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    is_steady: bool = False
    padding: tuple[int | float | str | None, ...] = ()


class Servable(Protocol):
    """One loaded version of a model.

    Attributes:
        signatures: the signatures by name.
        signature_defs: the same in the JSON form of TensorFlow's SignatureDef, for metadata.
    """

    signatures: Mapping[str, Signature]
    signature_defs: Mapping[str, Any]

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        """Return the signature's outputs for `inputs`, both in the signature's order. Several threads may call it.

        Raises:
            StatusError: TensorFlow's code and message.
        """

    def merging(self, signature: Signature) -> Merging | None:
        """Return how requests of `signature` are batched, or None if they cannot be."""

    def knows_merging(self, signature: Signature) -> bool:
        """Return True if `merging` returns at once. Otherwise it waits for a proof, which may take seconds."""

    def close(self) -> None:
        """Free its memory. No run follows."""


class State(enum.IntEnum):
    """The life of a version (ModelVersionStatus.State of get_model_status.proto)."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclasses.dataclass(frozen=True)
class VersionStatus:
    """The state of a version. `error` says why it is not served; None if nothing failed."""

    version: int
    state: State
    error: StatusError | None


class VersionProgress(NamedTuple):
    """How far a version is, for the log.

    Attributes:
        fault: why it did not load, and what happens next. Empty if nothing failed.
        tries: how many loads failed.
    """

    model: str
    version: int
    path: FilePath
    state: State
    fault: str = ""
    tries: int = 0


class LoadedVersion(NamedTuple):
    """The version that a request runs on.

    Attributes:
        request_logging: None if its model's requests are not logged.
    """

    version: int
    servable: Servable
    request_logging: RequestLogging | None = None
