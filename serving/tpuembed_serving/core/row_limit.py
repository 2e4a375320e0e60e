"""The limit of the rows of a request."""

from collections.abc import Sequence

from tpuembed_serving.core.servable import Array, Servable, Signature
from tpuembed_serving.core.service import Executor
from tpuembed_serving.core.status import invalid_argument

__all__ = ["RowLimit", "check_rows"]


def check_rows(inputs: Sequence[Array], most: int) -> None:
    """Raise StatusError, INVALID_ARGUMENT, if an input has more than `most` rows (its first dimension)."""
    rows = max((len(array) for array in inputs if array.ndim), default=0)
    if rows > most:
        raise invalid_argument(f"the request has {rows} rows. The limit is {most}. Send fewer rows per request")


class RowLimit:
    """An executor that refuses requests of more than `most` rows, and passes others to `executor`."""

    def __init__(self, executor: Executor, most: int) -> None:
        self._executor, self._most = executor, most

    async def run(
        self, servable: Servable, signature: Signature, inputs: Sequence[Array], *, timeout_seconds: float | None = None
    ) -> list[Array]:
        """Check the rows, then run; see ModelExecutor."""
        check_rows(inputs, self._most)
        return await self._executor.run(servable, signature, inputs, timeout_seconds=timeout_seconds)
