"""All models of a server, the thread that watches their folders, and the replacement of their config."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from tpuembed.errors import ConfigError
from tpuembed_serving.core.status import Code, StatusError, servable_not_found
from tpuembed_serving.models.model import Lease, LoadedVersion, Loader, ServedModel, State, VersionStatus
from tpuembed_serving.settings import DEFAULT_LOAD, LoadSettings, ModelSettings, check_models

__all__ = ["LoadedVersion", "Loader", "ModelRepository", "ServedModel", "State", "VersionStatus"]

logger = logging.getLogger(__name__)


def _nobody() -> None:
    """Nobody is told."""


class ModelRepository:
    """Loads, swaps and unloads in a thread of its own; every other method may be called from any thread.

    A model whose folder is another one in a new config is served from the old folder until a version of the new one is
    loaded; `_successors` has what is not loaded yet. `_leaving` has what requests may still use.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        load: Loader,
        poll_seconds: float,
        *,
        options: LoadSettings = DEFAULT_LOAD,
        changed: Callable[[], None] = _nobody,
    ) -> None:
        """`changed` is called after every change of a version's state, and of the models, by the thread that loads."""
        self._load, self._poll_seconds, self._options, self._changed = load, poll_seconds, options, changed
        self._wake = threading.Event()
        self._stopping = False
        self._reloading = threading.Lock()
        self._looks = threading.Condition()
        self._asked, self._done, self._looked = 0, 0, False
        self._loading = bool(models)
        self._configured = self._adopted = tuple(models)
        self._models = {model.name: self._model(model) for model in models}
        self._successors: dict[str, ServedModel] = {}
        self._removed: dict[str, ServedModel] = {}
        self._leaving: list[ServedModel] = []
        self._thread = threading.Thread(target=self._watch, name="model-repository", daemon=True)

    def start(self) -> None:
        """Begin to load and watch, in the background."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch and unload; a load in progress is waited for."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        with self._looks:
            self._looks.notify_all()
        for model in [*self._models.values(), *self._successors.values(), *self._leaving]:
            model.retire()
            model.unload()

    @property
    def ready(self) -> bool:
        """Whether every model has an available version, and requests are answered."""
        return not self._loading and all(model.available for model in self._models.values())

    @property
    def loading(self) -> bool:
        """Whether models were configured at the start whose first load has not ended yet, well or not."""
        return self._loading

    def lease(self, name: str, version: int | None, label: str | None = None) -> Lease:
        """See `ServedModel.lease`; a model that is not configured is NOT_FOUND, and has no label."""
        model = self._models.get(name)
        if model is not None:
            return model.lease(version, label)
        if label is not None:
            raise StatusError(Code.INVALID_ARGUMENT, f"Unrecognized servable version label: {label}")
        raise servable_not_found(name, version)

    def statuses(self, name: str) -> list[VersionStatus]:
        """Every version ever seen of model `name`, newest first; empty for a model that was never configured."""
        model = self._models.get(name) or self._removed.get(name)
        return model.statuses() if model else []

    def labels(self) -> dict[str, dict[str, int]]:
        """Every model that is served -> its labels and their versions."""
        return {name: model.labels for name, model in self._models.items()}

    def all_statuses(self) -> dict[str, list[VersionStatus]]:
        """Model -> every version of it ever seen, in this process; of models that were removed too."""
        return {name: model.statuses() for name, model in [*self._removed.items(), *self._models.items()]}

    def wait_for_look(self, stopping: Callable[[], bool]) -> None:
        """Return once every folder was looked at, and what it holds was loaded or has failed; or where `stopping` says so."""
        with self._looks:
            while not self._looked and not stopping():
                self._looks.wait(0.1)

    def reload(self, models: Sequence[ModelSettings]) -> None:
        """Serve `models` and no others; returns when their versions are loaded, or have failed.

        A label may only name a version that is available now (see LoadSettings). Of new models at least one version is to load.

        Raises:
            StatusError: INVALID_ARGUMENT or FAILED_PRECONDITION, and nothing is changed; UNKNOWN, `models` are served but for the
                new ones that it names, which are tried again as at the start; CANCELLED, the server stops.
        """
        with self._reloading:
            self.check(models)
            new = [model.name for model in models if model.name not in self._models]
            self._assign_labels(models)
            if not self._look_again(models):
                raise StatusError(Code.CANCELLED, "the server stops")
            self._check_available(new)

    def check(self, models: Sequence[ModelSettings]) -> None:
        """Raise StatusError, INVALID_ARGUMENT or FAILED_PRECONDITION, where `reload` would refuse `models`."""
        try:
            check_models(models)
        except ConfigError as error:
            raise StatusError(Code.INVALID_ARGUMENT, str(error)) from None
        for model in models:
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

    def _look_again(self, models: Sequence[ModelSettings]) -> bool:
        """Have the watch look at all folders with a new config; whether it has, and was not stopped before."""
        with self._looks:
            self._configured = tuple(models)
            self._asked += 1
            mine = self._asked
            self._wake.set()
            self._looks.wait_for(lambda: self._done >= mine or self._stopping)
            return self._done >= mine

    def _check_available(self, new: Iterable[str]) -> None:
        """WaitUntilModelsAvailable of TensorFlow Serving's server_core.cc."""
        reasons = [_why_not(model) for name in new if not (model := self._models[name]).available]
        reasons += [_why_not(model) for model in self._successors.values()]
        if self._stopping:  # and what was loaded may be unloaded by now
            raise StatusError(Code.CANCELLED, "the server stops")
        if reasons:
            listed = "".join(f"{{{reason}}}, " for reason in reasons)
            raise StatusError(Code.UNKNOWN, f"{len(reasons)} model(s) did not become available: {{{listed}}}")

    def _model(self, settings: ModelSettings) -> ServedModel:
        return ServedModel(settings, self._load, self._wake.set, options=self._options, changed=self._changed)

    def _watch(self) -> None:
        while not self._stopping:
            with self._looks:
                asked, configured = self._asked, self._configured
            news = configured is not self._adopted or not self._looked
            if configured is not self._adopted:
                self._adopt(configured)
                self._adopted = configured
            self._look()
            self._loading = False
            if news:
                self._changed()
            with self._looks:
                self._done, self._looked = asked, True
                self._looks.notify_all()
            self._wake.wait(self._poll_seconds)
            self._wake.clear()

    def _adopt(self, configured: Sequence[ModelSettings]) -> None:
        before, after = self._models, dict[str, ServedModel]()
        self._leaving += self._successors.values()
        self._successors = {}
        for settings in configured:
            served = before.get(settings.name) or self._model(settings)
            after[settings.name] = served
            if served.base_path == settings.base_path:
                served.configure(settings.policy)
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

    def _look(self) -> None:
        for name, model in self._models.items():
            if not self._stopping:
                self._poll(self._successors.get(name, model))
        for name, successor in list(self._successors.items()):
            if successor.available:
                self._succeed(name, successor)
        for model in self._leaving:
            model.retire()
            model.unload()
        self._leaving = [model for model in self._leaving if not model.idle]

    def _succeed(self, name: str, successor: ServedModel) -> None:
        before = self._models[name]
        self._models = {**self._models, name: successor}
        del self._successors[name]
        self._leave(before)
        self._changed()

    def _poll(self, model: ServedModel) -> None:
        try:
            model.poll()
        except Exception:  # the watch must outlive anything a folder can hold
            logger.exception("model %s: a look at its folder failed", model.name)


def _why_not(model: ServedModel) -> str:
    if model.listing_error:
        where = f"Could not find base path {model.base_path} for servable {model.name}"
        return f"{{name: {model.name}}} due to error: INVALID_ARGUMENT: {where} with error {model.listing_error}"
    failed = next((status for status in model.statuses() if status.error is not None), None)
    if failed is None or failed.error is None:
        return f"{{name: {model.name}}} due to error: NOT_FOUND: No versions of servable {model.name} found"
    return f"{{name: {model.name} version: {failed.version}}} due to error: {failed.error.to_string()}"
