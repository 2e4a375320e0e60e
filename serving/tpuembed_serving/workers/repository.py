"""The model repository of one worker among several. It loads for this worker, and reports the states of all."""

import threading
from collections.abc import Sequence
from typing import Any

from tpuembed_serving.core.servable import VersionStatus
from tpuembed_serving.models.repository import ModelRepository
from tpuembed_serving.settings import ModelSettings
from tpuembed_serving.workers.link import WorkerLink
from tpuembed_serving.workers.messages import CHECK, RELOAD, States

__all__ = ["WorkerRepository"]


class WorkerRepository(ModelRepository):
    """`statuses`, `ready` and `reload` concern all workers. Requests run on the versions that this worker has loaded."""

    def __init__(self, link: WorkerLink, *args: Any, **options: Any) -> None:
        """Connect the repository to `link`. `args` and `options` are those of ModelRepository."""
        self._link = link
        self._pushing = threading.Lock()
        super().__init__(*args, changed=self.push, **options)
        link.register(CHECK, self.check)
        link.register(RELOAD, super().reload)

    @property
    def ready(self) -> bool:
        """Returns True if every model has an available version in every worker."""
        return self._link.view.ready

    def statuses(self, name: str) -> list[VersionStatus]:
        """Return every version, each in the earliest state that any worker reports."""
        return list(self._link.view.models.get(name, ()))

    def reload(self, models: Sequence[ModelSettings]) -> None:
        """Reload in all workers; see ModelRepository.reload. If one worker refuses `models`, none changes."""
        self._link.gather(CHECK, tuple(models))
        self._link.gather(RELOAD, tuple(models))

    def push(self) -> None:
        """Send the states of this worker to the supervisor."""
        with self._pushing:
            self._link.push(States(self.all_statuses(), super().ready, self.progress()))
