"""The host's preparation of a batch for the SparseCores, in numpy, with the names of TensorFlow's ops.

Ids -> COO per SparseCore of the TPU -> sorted by the SparseCore that owns the row -> one CSR buffer. In the buffer,
every (SparseCore, owner) has a run that is padded to a multiple of 8.

Source: tensorflow/core/tpu/kernels/sparse_core_preprocess_ops.cc. The results are equal to the bit, errors included.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

__all__ = ["HostOps", "aligned", "check"]

Array = np.ndarray[Any, Any]

_ALIGN: Final = 8
_PADDING: Final = np.iinfo(np.int32).max
_DIVISION_LEVELS: Final = 6
"""For minibatches, an owner's ids are in 2^6 buckets: the default of TensorFlow's flag of this name."""


class HostOps:
    """The ops of `tensorflow.python.tpu.ops.gen_xla_ops`, with the same names and arguments."""

    def convert_to_list_of_sparse_core_coo_tensors(
        self,
        *,
        indices_or_row_splits: Any,
        values: Any,
        weights: Any,
        sample_count: int,
        combiner: str,
        num_sc_per_chip: int,
        row_offset: int,
        col_offset: int,
        col_shift: int,
        num_sc_shards: int,
        stacked_table_sample_count: int,
    ) -> tuple[list[Array], ...]:
        """Return (activation rows, stack columns as if unsharded, gains) of one feature, for each SparseCore of the
        TPU.

        An id that occurs twice in a row in one sample is merged, and its gains are summed.
        """
        check(sample_count % num_sc_per_chip == 0, f"{sample_count} samples on {num_sc_per_chip} SparseCores")
        ids, gains = np.asarray(values), np.asarray(weights)
        check(len(gains) == len(ids), f"{len(ids)} ids with {len(gains)} weights")
        samples = _samples(np.asarray(indices_or_row_splits), len(ids), sample_count)
        scale = _scale(combiner, samples, gains, sample_count)
        samples, ids, gains = _merged(samples, ids, gains)
        gains = gains if scale is None else gains * scale[samples]
        per_core, stacked = sample_count // num_sc_per_chip, stacked_table_sample_count // num_sc_per_chip
        core = samples // per_core
        rows = samples % per_core + row_offset // num_sc_per_chip + stacked * core
        modulo = num_sc_shards - 1
        columns = ((ids + col_shift) & modulo) + (ids & ~modulo) + col_offset
        parts = [core == index for index in range(num_sc_per_chip)]
        return [rows[part] for part in parts], [columns[part] for part in parts], [gains[part] for part in parts]

    def sort_list_of_sparse_core_coo_tensors(
        self,
        *,
        row_ids_list: Sequence[Array],
        col_ids_list: Sequence[Array],
        gains_list: Sequence[Array],
        sample_count_list: Sequence[int],
        num_replica: int,
        num_sc_per_chip: int,
        max_ids_per_sparse_core: int,
        max_unique_ids_per_sparse_core: int,
        table_name: str,
        **_: Any,
    ) -> tuple[Array, Array, Array, Array]:
        """Return (samples, rows in the owner's shard, gains, ends of each owner's ids) of all features, for one
        SparseCore.

        An id that occurs twice in one sample is merged, and its gains are summed.
        """
        owners = num_replica * num_sc_per_chip
        rows, columns, gains = (np.concatenate(part) for part in (row_ids_list, col_ids_list, gains_list))
        order = np.lexsort((rows, columns, columns % owners))
        rows, columns, gains = _merged(rows[order], columns[order], gains[order])
        counts = np.bincount(columns % owners, minlength=owners)
        unique = np.bincount(np.unique(columns) % owners, minlength=owners)
        limits = max_ids_per_sparse_core, max_unique_ids_per_sparse_core
        for what, numbers, limit in zip(("ids", "unique ids"), (counts, unique), limits, strict=True):
            worst = int(numbers.argmax())
            check(
                int(numbers[worst]) <= limit,
                f"Sparse core {worst} gets {numbers[worst]} {what} while the max {what} per sparse core is set to be {limit} for "
                f"table {table_name}. Raise the limit in the TableConfigs or in SparseCoreEmbeddingConfig.",
            )
        ends = np.concatenate([[0], np.cumsum(counts)])
        return rows % sum(sample_count_list), columns // owners, gains, ends

    def convert_to_sparse_core_csr_wrapped_coo_tensor(
        self,
        *,
        sorted_row_ids_list: Sequence[Array],
        sorted_col_ids_list: Sequence[Array],
        sorted_gains_list: Sequence[Array],
        id_counts_list: Sequence[Array],
        splits: Any,
        sample_count_per_sc: int,
        num_replica: int,
        max_minibatches_per_sc: int,
        max_ids_per_chip_per_sample: int,
        table_name: str,
        allow_id_dropping: bool,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Return (row pointers, samples, rows, gains, pointers used, ids used, minibatches) of one TPU's batch."""
        cores = len(id_counts_list)
        size = max_ids_per_chip_per_sample * sample_count_per_sc * cores
        check(size % _ALIGN == 0, f"the buffer of table {table_name} holds {size} ids, no multiple of {_ALIGN}")
        ends = [_minibatches(np.asarray(counts), num_replica * cores, int(splits)) for counts in id_counts_list]
        minibatches = ends[0].shape[0]
        check(minibatches <= max_minibatches_per_sc, f"{minibatches} minibatches of at most {max_minibatches_per_sc}")
        pointers = np.zeros((max_minibatches_per_sc * cores, aligned(num_replica * cores)), np.int32)
        buffers = [np.full(size, _PADDING, dtype) for dtype in (np.int32, np.int32, np.float32)]
        row = position = packed = 0
        lists = zip(sorted_row_ids_list, sorted_col_ids_list, sorted_gains_list, strict=True)
        for of_core, minibatches_of_core in zip(lists, ends, strict=True):
            sources = [np.asarray(source) for source in of_core]
            for of_owners in minibatches_of_core.tolist():
                for owner, (start, stop) in enumerate(of_owners):
                    taken = min(stop - start, size - position)  # as many as fit
                    for buffer, source in zip(buffers, sources, strict=True):
                        buffer[position : position + taken] = source[start : start + taken]
                    packed, position = packed + taken, position + taken
                    pointers[row, owner] = position
                    position = aligned(position)
                pointers[row, len(of_owners) :] = position
                row += 1
        missing = sum(int(np.asarray(counts)[-1]) for counts in id_counts_list) - packed
        check(
            allow_id_dropping or not missing,
            f"The max_ids_per_chip of table {table_name} is set to be {size} which is not going to fit all ids. The remaining "
            f"id count is {missing}. Raise max_ids_per_chip_per_sample, or set allow_id_dropping.",
        )
        if missing:
            logging.getLogger(__name__).warning(
                "Table %s is dropping %d ids, its buffer holds %d", table_name, missing, size
            )
        return pointers.reshape(-1), *buffers, cores * minibatches * pointers.shape[1], position, minibatches

    def tpu_copy_with_dynamic_shape(self, tensors: Sequence[Array], unpadded_sizes: Sequence[int]) -> list[Array]:
        """Return the used part of each tensor."""
        return [tensor[:size] for tensor, size in zip(tensors, unpadded_sizes, strict=True)]

    def tpu_annotate_tensors_with_dynamic_shape(self, tensors: Sequence[Array]) -> Sequence[Array]:
        """Return `tensors` unchanged."""
        return tensors


def aligned(position: int) -> int:
    """Return `position`, or the next one where a run may begin."""
    return -(-position // _ALIGN) * _ALIGN


def check(holds: bool, message: str) -> None:
    """Raise InvalidArgumentError, as a kernel does, unless `holds`."""
    if not holds:
        raise tf.errors.InvalidArgumentError(None, None, message)


def _samples(indices_or_row_splits: Array, ids: int, sample_count: int) -> Array:
    """Return the sample of each id, [ids], from indices [ids, 2], from row splits [samples + 1], or one id per sample."""
    if indices_or_row_splits.ndim == 2:
        samples = indices_or_row_splits[:, 0]
        check(bool(np.all(np.diff(samples) >= 0)), "indices of a SparseTensor must be sorted")
        check(
            not ids or bool(samples[-1] < sample_count), f"indices of a SparseTensor go beyond {sample_count} samples"
        )
        return samples
    if not len(indices_or_row_splits):
        check(ids in (0, sample_count), f"{ids} dense ids for {sample_count} samples")
        return np.arange(ids)
    given = len(indices_or_row_splits) - 1
    check(given == sample_count, f"{given} rows of ragged ids for {sample_count} samples")
    return np.repeat(np.arange(given), np.diff(indices_or_row_splits))


def _minibatches(ends: Array, owners: int, splits: int) -> Array:
    """Return the start and end of ids, [minibatches, owners, 2], from `ends` [owners + 1], or [owners * buckets + 1] in
    buckets.

    A minibatch is a run of buckets. Bit i of `splits` splits them at node i of a binary tree over the buckets, breadth
    first.
    """
    buckets = 1 << _DIVISION_LEVELS
    whole, divided = owners + 1, owners * buckets + 1
    check(
        len(ends) == divided or (len(ends) == whole and not splits),
        f"counts of ids for {splits=} must be {whole} without minibatches, or {divided}. There are {len(ends)}.",
    )
    if len(ends) == whole:
        return np.stack([ends[:-1], ends[1:]], 1)[None]
    nodes = [bit + 1 for bit in range(splits.bit_length()) if splits >> bit & 1]
    levels = [node.bit_length() for node in nodes]
    cuts = [(2 * (node - (1 << level - 1)) + 1) * buckets >> level for node, level in zip(nodes, levels, strict=True)]
    edges = np.array([0, *sorted(cuts), buckets])
    places = np.arange(owners)[:, None] * buckets + edges
    return np.stack([ends[places[:, :-1]].T, ends[places[:, 1:]].T], 2)


def _merged(rows: Array, columns: Array, gains: Array) -> tuple[Array, Array, Array]:
    """Return each run of equal (row, column) pairs once, with its gains summed in their order."""
    first = np.ones(len(rows), bool)
    first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    sums = gains[first]
    np.add.at(sums, np.cumsum(first)[~first] - 1, gains[~first])
    return rows[first], columns[first], sums


def _scale(combiner: str, samples: Array, weights: Array, sample_count: int) -> Array | None:
    """Return the factors of the gains [samples], so that sums give the result of `combiner`. Returns None for sums."""
    if combiner == "sum":
        return None
    totals = np.zeros(sample_count, np.float32)
    np.add.at(totals, samples, weights if combiner == "mean" else weights**2)
    norms = totals if combiner == "mean" else np.sqrt(totals)
    return np.divide(np.float32(1.0), norms, out=np.zeros_like(norms), where=norms != 0.0)
