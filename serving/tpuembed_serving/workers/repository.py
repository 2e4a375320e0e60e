"""The repository of one worker among several: it loads for itself, and speaks for all."""

import threading
from collections.abc import Sequence
from typing import Any

from tpuembed_serving.models.model import VersionStatus
from tpuembed_serving.models.repository import ModelRepository
from tpuembed_serving.settings import ModelSettings
from tpuembed_serving.workers.link import WorkerLink
from tpuembed_serving.workers.messages import CHECK, RELOAD, States

__all__ = ["WorkerRepository"]


class WorkerRepository(ModelRepository):
    """`statuses`, `ready` and `reload` are those of all workers; requests run on what this one has loaded."""

    def __init__(self, link: WorkerLink, *args: Any, **options: Any) -> None:
        """`args` and `options` are those of ModelRepository."""
        self._link = link
        self._pushing = threading.Lock()
        super().__init__(*args, changed=self._push, **options)
        link.register(CHECK, self.check)
        link.register(RELOAD, super().reload)

    @property
    def ready(self) -> bool:
        """Whether every model has an available version in every worker."""
        return self._link.view.ready

    def statuses(self, name: str) -> list[VersionStatus]:
        """Every version, as far as the worker is that is least far."""
        return list(self._link.view.models.get(name, ()))

    def reload(self, models: Sequence[ModelSettings]) -> None:
        """See ModelRepository.reload; returns when every worker is done. What one of them refuses changes none."""
        self._link.gather(CHECK, tuple(models))
        self._link.gather(RELOAD, tuple(models))

    def _push(self) -> None:
        with self._pushing:
            self._link.push(States(self.all_statuses(), super().ready))
