"""All models of a server: polls their folders in a thread, and replaces their config."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tpuembed.errors import ConfigError, TpuEmbedError
from tpuembed.files import UrlPath
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.reload_paths import ReloadPaths
from tpuembed_serving.core.servable import LoadedVersion, State, VersionProgress, VersionStatus
from tpuembed_serving.core.status import Code, StatusError, servable_not_found
from tpuembed_serving.models.model import Lease, Loader, ServedModel, outside
from tpuembed_serving.settings import ModelSettings, check_models, reload_paths

__all__ = ["LoadedVersion", "Loader", "ModelRepository", "ServedModel", "State", "VersionStatus"]

logger = logging.getLogger(__name__)

_UNSETTLED_SECONDS = 0.1
"""The longest pause between two polls while first versions are pulled from stores."""


class ModelRepository:
    """Loads, replaces and unloads versions in its own thread. Any thread may call its methods.

    A new config may give a model another folder. The old folder is served until a version of the new one is loaded.
    `_successors` holds the models that are not loaded yet. `_leaving` holds those that requests may still use.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        load: Loader,
        poll_seconds: float,
        *,
        changed: Callable[[], None] = noop,
        cache: Path | None = None,
        configured: Callable[[Sequence[ModelSettings]], None] = noop,
        check: Callable[[Sequence[ModelSettings]], None] = check_models,
        within: ReloadPaths | None = None,
    ) -> None:
        """Prepare the models; nothing is loaded yet.

        The thread that loads calls `changed` after every change of a version's state, and of the list of models. It
        calls `configured` with the models of a reload, before it looks for their versions.

        Args:
            models: the models of the start.
            load: loads a version from its folder.
            poll_seconds: the pause between two polls.
            changed: see above.
            cache: the folder into which versions are pulled from stores; None refuses models in stores.
            configured: see above.
            check: raises ConfigError if the models of a reload cannot be served.
            within: the folders that clients may choose; None for those of `models`.
        """
        self._within = reload_paths(models) if within is None else within
        self._check = check
        self._cache, self._on_configured = cache, configured
        self._load, self._poll_seconds, self._changed = load, poll_seconds, changed
        self._wake = threading.Event()
        self._stopping = False
        self._reloading = threading.Lock()
        self._polled_all = threading.Condition()
        self._asked, self._done, self._has_polled = 0, 0, False
        self._loading = bool(models)
        self._configured = self._adopted = tuple(models)
        self._models = {model.name: self._model(model) for model in models}
        self._successors: dict[str, ServedModel] = {}
        self._removed: dict[str, ServedModel] = {}
        self._leaving: list[ServedModel] = []
        self._thread = threading.Thread(target=self._watch, name="model-repository", daemon=True)

    def start(self) -> None:
        """Start loading and polling in a background thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling and unload everything. Waits for a load in progress."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        with self._polled_all:
            self._polled_all.notify_all()
        for model in [*self._models.values(), *self._successors.values(), *self._leaving]:
            model.retire()
            model.unload()

    @property
    def ready(self) -> bool:
        """Returns True if every model has an available version and requests are answered."""
        return not self._loading and all(model.available for model in self._models.values())

    @property
    def loading(self) -> bool:
        """Returns True until the first load of every model of the first config has ended, with success or failure."""
        return self._loading

    def lease(self, name: str, version: int | None, label: str | None = None) -> Lease:
        """Return a lease of a version of model `name`; see `ServedModel.lease`.

        Raises:
            StatusError: the model is not configured: INVALID_ARGUMENT if a label is given, otherwise NOT_FOUND.
        """
        model = self._models.get(name)
        if model is not None:
            return model.lease(version, label)
        if label is not None:
            raise StatusError(Code.INVALID_ARGUMENT, f"Unrecognized servable version label: {label}")
        raise servable_not_found(name, version)

    def statuses(self, name: str) -> list[VersionStatus]:
        """Return every version of model `name` that was ever wanted, newest first. Empty if it was never configured."""
        model = self._models.get(name) or self._removed.get(name)
        return model.statuses() if model else []

    def labels(self) -> dict[str, dict[str, int]]:
        """Return the labels and their versions, by model."""
        return {name: model.labels for name, model in self._models.items()}

    def all_statuses(self) -> dict[str, list[VersionStatus]]:
        """Return model -> every version that this process ever found, including removed models."""
        return {name: model.statuses() for name, model in [*self._removed.items(), *self._models.items()]}

    def progress(self) -> list[VersionProgress]:
        """Return how far every version is, for the log, including those of a new folder that is not served yet."""
        models = [*self._removed.values(), *self._leaving, *self._models.values(), *self._successors.values()]
        return [one for model in dict.fromkeys(models) for one in model.progress()]

    def wait_for_first_poll(self, stopping: Callable[[], bool]) -> None:
        """Block until the versions of every folder are loaded or have failed, or until `stopping` returns True."""
        with self._polled_all:
            while not self._has_polled and not stopping():
                self._polled_all.wait(0.1)

    def reload(self, models: Sequence[ModelSettings]) -> None:
        """Serve `models` and no others. Returns when their versions are loaded or have failed.

        A label may only name a version that is available now. A new model must load at least one version.

        Raises:
            StatusError: INVALID_ARGUMENT or FAILED_PRECONDITION, nothing is changed; UNKNOWN, the config is applied, but
                the new models that the message names have no available version, and are retried; CANCELLED, the
                server is stopping.
        """
        with self._reloading:
            self.check(models)
            new = [model.name for model in models if model.name not in self._models]
            self._assign_labels(models)
            if not self._poll_again(models):
                raise StatusError(Code.CANCELLED, "the server is stopping")
            self._check_available(new)

    def reload_by_client(self, models: Sequence[ModelSettings]) -> None:
        """Reload what a client chose; see `reload`. The operator's own models stay as they are.

        Raises:
            StatusError: PERMISSION_DENIED, a client may not choose a folder, or where requests are logged. Nothing is changed.
        """
        # The file of --config may have changed since the start: what it has now is the operator's choice, too.
        own = [model for model in self._configured if model.within is None]
        folders = {model.base_path for model in own}
        prefixes = reload_paths(own).log_prefixes | self._within.log_prefixes
        limited = []
        for model in models:
            if model.request_logging is not None and model.request_logging.filename_prefix not in prefixes:
                raise StatusError(
                    Code.PERMISSION_DENIED,
                    f"model {model.name}: filename_prefix is {model.request_logging.filename_prefix}. A reload may only log to "
                    "a prefix of the server's own config. Write it into --config",
                )
            if model.base_path in folders or self._within.is_chosen(model.base_path):
                limited.append(model)
            elif self._within.find(model.base_path) is not None:
                limited.append(dataclasses.replace(model, within=self._within))
            else:
                raise outside(model.name, model.base_path)
        self.reload(limited)

    def check(self, models: Sequence[ModelSettings]) -> None:
        """Raise StatusError, INVALID_ARGUMENT or FAILED_PRECONDITION, if `reload` would refuse `models`."""
        try:
            self._check(models)
        except ConfigError as error:
            raise StatusError(Code.INVALID_ARGUMENT, str(error)) from None
        for model in models:
            if self._cache is None and isinstance(model.base_path, UrlPath):
                text = f"model {model.name}: {model.base_path} is in a store, and this server has no cache"
                raise StatusError(Code.INVALID_ARGUMENT, f"{text}. Start it with --cache-dir")
            served = self._models.get(model.name) or self._model(
                ModelSettings(name=model.name, base_path=model.base_path)
            )
            if text := served.label_fault(model.labels):
                raise StatusError(Code.FAILED_PRECONDITION, text)

    def _assign_labels(self, models: Iterable[ModelSettings]) -> None:
        for model in models:
            served = self._models.get(model.name)
            if served is not None and served.base_path == model.base_path:
                served.assign(model.labels)

    def _poll_again(self, models: Sequence[ModelSettings]) -> bool:
        """Make the thread poll all folders with a new config. Returns False if the repository was stopped first."""
        with self._polled_all:
            self._configured = tuple(models)
            self._asked += 1
            mine = self._asked
            self._wake.set()
            self._polled_all.wait_for(lambda: self._done >= mine or self._stopping)
            return self._done >= mine

    def _check_available(self, new: Iterable[str]) -> None:
        """Raise UNKNOWN if a new model is not available, as WaitUntilModelsAvailable of server_core.cc."""
        reasons = [_why_not(model) for name in new if not (model := self._models[name]).available]
        reasons += [_why_not(model) for model in self._successors.values()]
        if self._stopping:  # a new model may be unloaded again by now
            raise StatusError(Code.CANCELLED, "the server is stopping")
        if reasons:
            listed = "".join(f"{{{reason}}}, " for reason in reasons)
            raise StatusError(Code.UNKNOWN, f"{len(reasons)} model(s) did not become available: {{{listed}}}")

    def _model(self, settings: ModelSettings) -> ServedModel:
        return ServedModel(settings, self._load, self._wake.set, changed=self._changed, cache=self._cache)

    def _watch(self) -> None:
        while not self._stopping:
            with self._polled_all:
                asked, configured = self._asked, self._configured
            news = configured is not self._adopted or not self._has_polled
            if configured is not self._adopted:
                self._adopt(configured)
                self._adopted = configured
            self._poll_all()
            settled = all(self._successors.get(name, model).settled for name, model in self._models.items())
            if settled:
                self._loading = False
            if news:
                self._changed()
            with self._polled_all:
                if settled:
                    self._done, self._has_polled = asked, True
                self._polled_all.notify_all()
            self._wake.wait(self._poll_seconds if settled else min(self._poll_seconds, _UNSETTLED_SECONDS))
            self._wake.clear()

    def _adopt(self, configured: Sequence[ModelSettings]) -> None:
        try:
            self._on_configured(configured)
        except TpuEmbedError as error:
            logger.error("%s", error)
        before, after = self._models, dict[str, ServedModel]()
        self._leaving += self._successors.values()
        self._successors = {}
        for settings in configured:
            served = before.get(settings.name) or self._model(settings)
            after[settings.name] = served
            if served.base_path == settings.base_path:
                served.configure(settings)
            else:
                self._successors[settings.name] = self._model(settings)
        self._models = after
        for name, model in before.items():
            if name not in after:
                self._removed[name] = model
                self._leave(model)

    def _leave(self, model: ServedModel) -> None:
        model.retire()
        self._leaving.append(model)

    def _poll_all(self) -> None:
        for name, model in self._models.items():
            if not self._stopping:
                self._poll(self._successors.get(name, model))
        for name, successor in list(self._successors.items()):
            if successor.available:
                self._replace_model(name, successor)
        for model in self._leaving:
            model.retire()
            model.unload()
        self._leaving = [model for model in self._leaving if not model.idle]

    def _replace_model(self, name: str, successor: ServedModel) -> None:
        before = self._models[name]
        self._models = {**self._models, name: successor}
        del self._successors[name]
        self._leave(before)
        self._changed()

    def _poll(self, model: ServedModel) -> None:
        try:
            model.poll()
        except Exception:  # polling must survive anything that a folder can hold
            logger.exception("model %s: the poll of its folder failed", model.name)


def _why_not(model: ServedModel) -> str:
    if model.listing_error:
        where = f"Could not find base path {model.base_path} for servable {model.name}"
        return f"{{name: {model.name}}} due to error: INVALID_ARGUMENT: {where} with error {model.listing_error}"
    failed = next((status for status in model.statuses() if status.error is not None), None)
    if failed is None or failed.error is None:
        return f"{{name: {model.name}}} due to error: NOT_FOUND: No versions of servable {model.name} found"
    return f"{{name: {model.name} version: {failed.version}}} due to error: {failed.error.to_string()}"
