"""The lookup and the update on the SparseCores of all TPUs, in numpy, with the names of TensorFlow's ops.

Every replica contributes its batch's buffer and its shards of the stack. Source:
tensorflow/core/tpu/kernels/sparse_core_xla_ops.cc. The contract is the same.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.testing import optimizer_rules
from tpuembed.testing.host_ops import HostOps, aligned, check

__all__ = ["Exchange", "SparseCoreOps"]

Array = np.ndarray[Any, Any]

# Attributes of the update ops that describe the buffer.
_OF_THE_BUFFER: Final = {"max_ids_per_sparse_core", "max_unique_ids_per_sparse_core", "table_name"}


Exchange = Callable[[Callable[[Sequence[Any]], Sequence[Any]], Any], Any]
"""Takes a function and a replica's value. Returns the replica's item of `function(the values of all replicas, in order)`, which
is computed once."""


@dataclasses.dataclass(frozen=True)
class _Ids:
    """Ids of one replica's batch, and their positions.

    Attributes:
        core: [n] the SparseCore of the replica's TPU that looks up the id.
        sample: [n] the row of that SparseCore's activations.
        owner: [n] the SparseCore, of all TPUs, that owns the row.
        row: [n] the row in the owner's shard.
        gain: [n, 1] the factor of the row.
    """

    core: Array
    sample: Array
    owner: Array
    row: Array
    gain: Array


@dataclasses.dataclass(frozen=True)
class _Update:
    """One replica's input to an update: ids, gradients [SparseCores, samples, width], rate, its shards of table and slots."""

    ids: _Ids
    gradients: Array
    rate: float
    shards: Sequence[Array]


class SparseCoreOps(HostOps):
    """All ops that TensorFlow's SparseCore class uses, with the arguments of `tensorflow.python.tpu.ops.gen_xla_ops`."""

    def __init__(self, exchange: Exchange, replicas: int, sparse_cores: int) -> None:
        """Simulate `replicas` TPUs with `sparse_cores` each."""
        self._exchange, self._replicas, self._cores = exchange, replicas, sparse_cores

    def xla_sparse_dense_matmul_with_static_buffer_size(
        self,
        *,
        row_pointers: Array,
        sorted_sample_ids: Array,
        sorted_token_ids: Array,
        sorted_gains: Array,
        input_size: int,
        embedding_table: Any,
        num_minibatches_per_physical_sparse_core: Any,
        quantization_config_num_buckets: int,
        table_name: str,
        **_: Any,
    ) -> Any:
        """Return the activations [input_size, width]: sums of gain times row."""
        if quantization_config_num_buckets:
            raise ConfigError(f"table {table_name!r}: quantization_config cannot be simulated. Drop it.")
        buffer = row_pointers, sorted_sample_ids, sorted_token_ids, sorted_gains
        ids = self._unpack(buffer, int(num_minibatches_per_physical_sparse_core))
        # [SparseCores of all TPUs, rows, width], once for every replica
        shard = embedding_table.read_value().numpy()
        table = self._exchange(lambda shards: [self._by_owner(shards)] * len(shards), shard)
        check(
            bool(np.all((ids.row >= 0) & (ids.row < table.shape[1]))),
            f"an id of stack {table_name} is outside the stack, where a TPU reads other memory. Check the ids of its tables.",
        )
        activations = np.zeros((self._cores, input_size // self._cores, table.shape[-1]), np.float32)
        np.add.at(activations, (ids.core, ids.sample), ids.gain * table[ids.owner, ids.row])
        return tf.constant(activations.reshape(input_size, -1))

    def _by_owner(self, shards: Sequence[Array]) -> Array:
        return np.concatenate([shard.reshape(self._cores, -1, shard.shape[1]) for shard in shards])

    def _unpack(self, buffer: Sequence[Any], minibatches: int) -> _Ids:
        """Return the ids in one TPU's CSR buffer (row pointers, samples, rows, gains), of all minibatches."""
        pointers, samples, rows, gains = map(np.asarray, buffer)
        runs = list(_runs(pointers.reshape(self._cores, minibatches, -1)[..., : self._replicas * self._cores]))
        used = np.concatenate([np.arange(start, stop) for _, _, start, stop in runs])
        lengths = [stop - start for *_, start, stop in runs]
        core, owner = (np.repeat([run[which] for run in runs], lengths) for which in (0, 1))
        return _Ids(core, samples[used], owner, rows[used], gains[used, None])

    def _update(
        self,
        rule: Callable[..., tuple[Array, ...]],
        slots: Sequence[str],
        *,
        row_pointers: Array,
        sorted_sample_ids: Array,
        sorted_token_ids: Array,
        sorted_gains: Array,
        activation_gradients: Any,
        learning_rate: Any,
        embedding_table: Any,
        num_minibatches_per_physical_sparse_core: Any,
        **attributes: Any,
    ) -> Any:
        """Apply `rule` to the rows that any replica touched. Returns this replica's new shards of the table and of `slots`."""
        shards = [np.asarray(shard) for shard in (embedding_table, *(attributes.pop(slot) for slot in slots))]
        buffer = row_pointers, sorted_sample_ids, sorted_token_ids, sorted_gains
        ids = self._unpack(buffer, int(num_minibatches_per_physical_sparse_core))
        gradients = np.asarray(activation_gradients).reshape(self._cores, -1, shards[0].shape[1])
        contribution = _Update(ids, gradients, float(learning_rate), shards)
        of_the_rule = {name: value for name, value in attributes.items() if name not in _OF_THE_BUFFER}
        hyper_parameters = {  # the op's attributes are float32
            name: float(np.float32(value)) if isinstance(value, float) else value for name, value in of_the_rule.items()
        }
        updated = self._exchange(
            functools.partial(self._apply, functools.partial(rule, **hyper_parameters)), contribution
        )
        return updated if slots else updated[0]

    def _apply(self, rule: Callable[..., tuple[Array, ...]], contributions: Sequence[_Update]) -> list[list[Array]]:
        """Return the new shards of every replica. Each row is updated once, with the gradients of all replicas."""
        (rate,) = {update.rate for update in contributions}
        tables = [self._by_owner(shards) for shards in zip(*(update.shards for update in contributions), strict=True)]
        sums, touched = np.zeros(tables[0].shape), np.zeros(tables[0].shape[:2], bool)
        for update in contributions:
            ids = update.ids
            np.add.at(sums, (ids.owner, ids.row), ids.gain * update.gradients[ids.core, ids.sample])
            touched[ids.owner, ids.row] = True
        with np.errstate(divide="ignore", invalid="ignore"):  # on a TPU too, padding may become NaN
            rows = rule(sums[touched], rate, *(table[touched].astype(np.float64) for table in tables))
        for table, new in zip(tables, rows, strict=True):
            table[touched] = new
        flat = [table.reshape(-1, table.shape[-1]) for table in tables]
        return [
            list(of_replica)
            for of_replica in zip(*(np.split(table, len(contributions)) for table in flat), strict=True)
        ]

    xla_sparse_dense_matmul_grad_with_sgd_and_static_buffer_size = functools.partialmethod(
        _update, optimizer_rules.sgd, ()
    )
    xla_sparse_dense_matmul_grad_with_adagrad_and_static_buffer_size = functools.partialmethod(
        _update, optimizer_rules.adagrad, ("accumulator",)
    )
    xla_sparse_dense_matmul_grad_with_adagrad_momentum_and_static_buffer_size = functools.partialmethod(
        _update, optimizer_rules.adagrad_momentum, ("accumulator", "momenta")
    )
    xla_sparse_dense_matmul_grad_with_adam_and_static_buffer_size = functools.partialmethod(
        _update, optimizer_rules.adam, ("momenta", "velocity")
    )
    xla_sparse_dense_matmul_grad_with_ftrl_and_static_buffer_size = functools.partialmethod(
        _update, optimizer_rules.ftrl, ("accumulator", "linear")
    )


def _runs(pointers: Array) -> Iterator[tuple[int, int, int, int]]:
    """Yield (SparseCore, owner, start, stop) of every run of the buffer. `pointers` [SparseCores, minibatches, owners] are ends."""
    start = 0
    for (core, _, owner), stop in np.ndenumerate(pointers):
        check(stop >= start, f"the row pointers of SparseCore {core} decrease from {start} to {stop}")
        yield core, owner, start, int(stop)
        start = aligned(int(stop))
