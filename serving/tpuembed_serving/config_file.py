"""Watches a models.config, and has the server follow it."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tpuembed.errors import TpuEmbedError
from tpuembed_serving.models_config import read_models
from tpuembed_serving.settings import ModelSettings
from tpuembed_serving.status import Code, StatusError

__all__ = ["ConfigFile"]

logger = logging.getLogger(__name__)


class ConfigFile:
    """Reads the file every `poll_seconds`; one that is broken, or that the server refuses, changes nothing."""

    def __init__(
        self,
        path: Path,
        models: Sequence[ModelSettings],
        poll_seconds: float,
        reload: Callable[[Sequence[ModelSettings]], None],
    ) -> None:
        """`models` is what the server follows already; `reload` raises as ModelRepository.reload does."""
        self._path, self._poll_seconds, self._reload = path, poll_seconds, reload
        self._followed = tuple(models)
        self._fault = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="models-config", daemon=True)

    def start(self) -> None:
        """Begin, in the background."""
        self._thread.start()

    def stop(self) -> None:
        """End; a reload in progress goes on by itself."""
        self._stopping.set()

    def look(self) -> None:
        """Read it once. What is refused is tried again at the next look, and said once."""
        try:
            models = read_models(self._path)
            if models != self._followed:
                self._follow(models)
            self._fault = ""
        except TpuEmbedError as error:
            if str(error) != self._fault:
                logger.error("%s: not followed, the config before it goes on: %s", self._path, error)
            self._fault = str(error)

    def _follow(self, models: Sequence[ModelSettings]) -> None:
        try:
            self._reload(models)
        except StatusError as error:
            if error.code is not Code.UNKNOWN:
                raise
            logger.error("%s: followed, but %s", self._path, error)
        else:
            logger.info("%s: followed", self._path)
        self._followed = tuple(models)

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                self.look()
            except Exception:  # the watch must outlive anything a file can hold
                logger.exception("%s: a look at it failed", self._path)
