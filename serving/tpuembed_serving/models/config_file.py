"""Polls a models.config and applies its changes to the server."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tpuembed.errors import TpuEmbedError
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.config import read_models
from tpuembed_serving.settings import ModelSettings

__all__ = ["ConfigFile"]

logger = logging.getLogger(__name__)


class ConfigFile:
    """Reads the file every `poll_seconds`. A file that is broken, or that the server refuses, changes nothing."""

    def __init__(
        self,
        path: Path,
        models: Sequence[ModelSettings],
        poll_seconds: float,
        reload: Callable[[Sequence[ModelSettings]], None],
    ) -> None:
        """Prepare to apply the file.

        Args:
            models: the models that the server has already.
            reload: replaces them; raises as ModelRepository.reload does.
        """
        self._path, self._poll_seconds, self._reload = path, poll_seconds, reload
        self._followed = tuple(models)
        self._fault = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="models-config", daemon=True)

    def start(self) -> None:
        """Start polling in a background thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling. A reload in progress still finishes."""
        self._stopping.set()

    def poll(self) -> None:
        """Read the file once. A file that is refused is tried again at the next poll, and logged once."""
        try:
            models = read_models(self._path)
            if models != self._followed:
                self._follow(models)
            self._fault = ""
        except TpuEmbedError as error:
            if str(error) != self._fault:
                logger.error("%s: not applied. The previous config stays in use. %s", self._path, error)
            self._fault = str(error)

    def _follow(self, models: Sequence[ModelSettings]) -> None:
        try:
            self._reload(models)
        except StatusError as error:
            if error.code is not Code.UNKNOWN:
                raise
            logger.error("%s: applied, but %s", self._path, error)
        else:
            logger.info("%s: applied", self._path)
        self._followed = tuple(models)

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                self.poll()
            except Exception:  # polling must survive anything that a file can hold
                logger.exception("%s: the poll failed", self._path)
