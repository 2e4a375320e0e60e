"""Broken variants of layer and simulator: each must make its check of `live` fail."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import numpy as np

from tests.support.simulated_tpu import host_ops
from tests.support.simulated_tpu.host_ops import HostOps
from tests.tpu.numbers.variant import Variant
from tpuembed.backends import sparsecore, stack_ids, tf_config, tf_tpu
from tpuembed.backends.stacked_table import StackLayout
from tpuembed.backends.tf_tpu import SparseCoreEngine

__all__ = ["BROKEN"]


def _method(owner: Any, name: str, broken: Callable[..., Any]) -> Callable[[], Any]:
    """The method, called through broken(right method, ...)."""
    right = getattr(owner, name)

    def instead(*arguments: Any, **named: Any) -> Any:
        return broken(right, *arguments, **named)

    return lambda: mock.patch.object(owner, name, instead)


def _not_rotated(_: Any, layout: StackLayout, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    return _runs(dataclasses.replace(layout, rotation=0), start, stop)


def _one_row_further(right: Any, layout: StackLayout, *rows: int) -> Iterator[tuple[int, slice, slice]]:
    for core, stored, of in right(layout, *rows):
        yield core, slice(max(stored.start - 1, 0), max(stored.start - 1, 0) + stored.stop - stored.start), of


_runs = StackLayout.runs


def _pointers_swapped(right: Any, ops: Any, tensors: Any, sizes: Any) -> Any:
    pointers, *buffers = right(ops, tensors, sizes)
    swapped = np.array(pointers)
    swapped[[0, 1]] = swapped[[1, 0]]
    return [swapped, *buffers]


def _pointer_short(right: Any, ops: Any, tensors: Any, sizes: Any) -> Any:
    pointers, *buffers = right(ops, tensors, sizes)
    short = np.array(pointers)
    short[0] = max(short[0] - 1, 0)
    return [short, *buffers]


def _other_combiner() -> Any:
    right, others = tf_config._table_to_tf, {"sum": "mean", "mean": "sqrtn", "sqrtn": "sum"}

    def broken(table: Any) -> Any:
        return right(dataclasses.replace(table, combiner=others[table.combiner]))

    return mock.patch.object(tf_config, "_table_to_tf", broken)


def _features_swapped(right: Any, engine: Any, *arguments: Any) -> Any:
    (first, second, *others), preserved = right(engine, *arguments)
    return [second, first, *others], preserved


def _without_root(right: Any, combiner: str, samples: Any, weights: Any, count: int) -> Any:
    return right("mean" if combiner == "sqrtn" else combiner, samples, weights, count)


def _added_pairwise(right: Any, rows: Any, columns: Any, gains: Any) -> Any:
    first = np.ones(len(rows), bool)
    first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    summed = np.add.reduceat(gains.astype(np.float64), np.flatnonzero(first)) if len(gains) else gains
    return rows[first], columns[first], summed.astype(np.float32)


def _by_row(right: Any, ops: Any, **arguments: Any) -> Any:
    rows, columns, gains, ends = right(ops, **arguments)
    runs = itertools.pairwise(ends)
    order = np.concatenate([start + np.argsort(rows[start:stop], kind="stable") for start, stop in runs])
    return rows[order], columns[order], gains[order], ends


def _one_more(right: Any, engine: Any, limits: Any) -> None:
    right(engine, {table: tuple(limit and limit + 1 for limit in of) for table, of in limits.items()})


def _twice(right: Any, *arguments: Any, **named: Any) -> None:
    right(*arguments, **named)
    right(*arguments, **named)


def _doubled(right: Any, engine: Any, gradients: Any, *others: Any) -> None:
    right(engine, [2.0 * gradient for gradient in gradients], *others)


def _gradients_exchanged(right: Any, engine: Any, gradients: Any, *others: Any) -> None:
    """Of `a` and `a_again`, two features of one table."""
    first, second, *more = gradients
    right(engine, [second, first, *more], *others)


LOOKUP, STEP, MINIBATCHES = (
    "lookups_equal_plain_ones",
    "a_step_moves_the_rows_that_it_looked_up",
    "minibatches_equal_plain_lookups",
)
BROKEN: Final = [
    Variant("not_rotated", "tables of a stack all begin on the first SparseCore", LOOKUP, "kernels",
        _method(StackLayout, "runs", _not_rotated)),
    Variant("one_row_further", "a table's rows lie one further in the stack than its layout says", LOOKUP, "kernels",
        _method(StackLayout, "runs", _one_row_further)),
    Variant("pointers_swapped", "two row pointers are exchanged", LOOKUP, "kernels",
        _method(HostOps, "tpu_copy_with_dynamic_shape", _pointers_swapped)),
    Variant("pointer_short", "a row pointer is one id too small", LOOKUP, "kernels",
        _method(HostOps, "tpu_copy_with_dynamic_shape", _pointer_short)),
    Variant("other_combiner", "tables have another combiner", LOOKUP, "kernels", _other_combiner),
    Variant("no_weights", "weights are dropped", LOOKUP, "kernels",
        lambda: mock.patch.object(sparsecore, "given_weights", return_value=None)),
    Variant("features_swapped", "two features get each other's activations", LOOKUP, "kernels",
        _method(SparseCoreEngine, "__call__", _features_swapped)),
    Variant("no_root", "the simulator scales sqrtn by the sum of the weights", LOOKUP, "kernels",
        _method(host_ops, "_scale", _without_root)),
    Variant("added_in_double", "the simulator adds up gains in double precision", LOOKUP, "kernels",
        _method(host_ops, "_merged", _added_pairwise)),
    Variant("aligned_to_16", "the simulator's runs begin at multiples of 16", LOOKUP, "kernels",
        lambda: mock.patch.object(host_ops, "_ALIGN", 16)),
    Variant("sorted_by_sample", "the simulator sorts an owner's ids by sample", LOOKUP, "kernels",
        _method(HostOps, "sort_list_of_sparse_core_coo_tensors", _by_row)),
    Variant("fewer_buckets", "the simulator's minibatches are made of fewer buckets", MINIBATCHES, "kernels",
        lambda: mock.patch.object(host_ops, "_DIVISION_LEVELS", 5)),
    Variant("one_id_more", "limits are one higher than what was asked for", "limits_hold_to_the_id", "kernels",
        _method(SparseCoreEngine, "limit_ids", _one_more)),
    Variant("no_padding", "the layer forgets the padding of runs in a buffer", "room_is_refused_where_the_kernel_refuses_it",
        "kernels", lambda: mock.patch.object(stack_ids, "_ALIGN", 1)),
    Variant("applied_twice", "a gradient is applied twice", STEP, "kernels",
        _method(SparseCoreEngine, "apply_gradients", _twice)),
    Variant("gradients_exchanged", "two features get each other's gradients", STEP, "kernels",
        _method(SparseCoreEngine, "apply_gradients", _gradients_exchanged)),
    Variant("ids_unchecked", "the layer hands on every id", "ids_outside_of_their_table_fail", "kernels",
        lambda: mock.patch.object(tf_tpu, "ids_inside", lambda ids, weights, *_: (ids, weights))),
    Variant("room_unchecked", "the layer leaves a full buffer to the kernel, whose error names no table", "room_holds_to_the_id",
        "kernels", lambda: mock.patch.object(tf_tpu, "ids_with_room", lambda ends, *_: ends)),
    Variant("one_more_than_counted", "limits are one higher than what statistics say",
        "statistics_equal_the_limits_that_hold", "kernels", _method(SparseCoreEngine, "limit_ids", _one_more)),
    Variant("doubled", "gradients are twice as large", STEP, "kernels",
        _method(SparseCoreEngine, "apply_gradients", _doubled)),
]  # fmt: skip
"""Which check of `live`, with TensorFlow's kernels, catches it."""
