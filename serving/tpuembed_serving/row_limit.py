"""A limit of the rows of a request, in front of whatever runs it."""

from collections.abc import Sequence

from tpuembed_serving.servable import Array, Servable, Signature
from tpuembed_serving.service import Executor
from tpuembed_serving.status import invalid_argument

__all__ = ["RowLimit"]


class RowLimit:
    """Runs what `executor` runs, but for requests of more rows than `most`, which are INVALID_ARGUMENT."""

    def __init__(self, executor: Executor, most: int) -> None:
        self._executor, self._most = executor, most

    async def run(
        self, servable: Servable, signature: Signature, inputs: Sequence[Array], *, timeout_seconds: float | None = None
    ) -> list[Array]:
        """See ModelExecutor; rows are the first dimension of any input."""
        rows = max((len(array) for array in inputs if array.ndim), default=0)
        if rows > self._most:
            raise invalid_argument(
                f"the request has {rows} rows, and this server takes at most {self._most}; send less at once"
            )
        return await self._executor.run(servable, signature, inputs, timeout_seconds=timeout_seconds)
