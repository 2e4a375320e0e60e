"""Logs what becomes of versions and of the server, once, whichever and however many processes load them."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tpuembed.files import FilePath
from tpuembed_serving.core.servable import State, VersionProgress

__all__ = ["StateLog"]

logger = logging.getLogger(__name__)

_Key = tuple[str, FilePath]


class StateLog:
    """Compares each report with the one before, and logs the difference. Any thread may call its methods."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        """`on_ready` is called once: when the server listens and every model has a version."""
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._known: dict[_Key, VersionProgress] = {}
        self._started: dict[_Key, float] = {}
        self._listens = self._is_ready = self._has_announced = False

    def listening(self) -> None:
        """Note that the port answers."""
        self._listens = True
        self._announce()

    def note(self, progress: Sequence[VersionProgress], ready: bool) -> None:
        """Log what has changed. `ready` is whether every model has a version."""
        with self._lock:
            found = {(one.model, one.path): one for one in progress}
            for key, now in found.items():
                before = self._known.get(key)
                if before is not None and before.state is State.AVAILABLE and now.state < State.AVAILABLE:
                    continue  # a worker that listens since now is still behind
                self._known[key] = now
                self._log(key, now, before)
            for key in self._known.keys() - found.keys():
                if self._known[key].state <= State.LOADING:
                    continue  # a worker that listens since now does not know of the load yet
                del self._known[key]
                self._started.pop(key, None)
        self._is_ready = ready
        self._announce()

    def _announce(self) -> None:
        with self._lock:
            is_due = self._listens and self._is_ready and not self._has_announced
            self._has_announced |= is_due
        if is_due:
            self._on_ready()

    def _log(self, key: _Key, now: VersionProgress, before: VersionProgress | None) -> None:
        fields = {"model": now.model, "version": now.version}
        was = None if before is None else before.state
        if now.state <= State.LOADING and was in (None, State.END) and isinstance(now.path, Path):
            self._started[key] = time.monotonic()
            logger.info("loading %s from %s", now.model, now.path, extra={"fields": {**fields, "path": str(now.path)}})
        elif now.state is State.AVAILABLE and was not in (State.AVAILABLE, State.UNLOADING):
            seconds = round(time.monotonic() - self._started.pop(key, time.monotonic()), 2)
            text = "model %s version %d is available after %.2f s"
            logger.info(text, now.model, now.version, seconds, extra={"fields": {**fields, "seconds": seconds}})
        elif now.state is State.END and now.fault:
            if before is None or before.fault != now.fault or before.tries != now.tries:
                text = "model %s version %d cannot be loaded: %s"
                logger.error(text, now.model, now.version, now.fault, extra={"fields": fields})
        elif now.state is State.END and was in (State.START, State.LOADING):
            text = "model %s version %d: its load is given up: the server is stopping"
            logger.info(text, now.model, now.version, extra={"fields": fields})
        elif now.state is State.END and was in (State.AVAILABLE, State.UNLOADING):
            logger.info("model %s version %d unloaded", now.model, now.version, extra={"fields": fields})
