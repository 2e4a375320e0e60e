"""What requests may call the versions of a model besides their numbers."""

from collections.abc import Collection, Mapping

from tpuembed_serving.core.status import invalid_argument

__all__ = ["VersionLabels"]


class VersionLabels:
    """The labels of one model. Whoever calls a method holds the lock of the model's versions.

    Labels of the first config wait until their versions are available: TensorFlow Serving would not start with them.
    """

    def __init__(self, model: str, labels: Mapping[str, int], *, allow_unavailable: bool) -> None:
        """`allow_unavailable`: whether a new label may name a version that is not available."""
        self._model = model
        self._allow_unavailable = allow_unavailable
        self._assigned: dict[str, int] = dict(labels) if allow_unavailable else {}
        self._waiting: dict[str, int] = {} if allow_unavailable else dict(labels)

    def version(self, label: str) -> int:
        """The version that `label` names.

        Raises:
            StatusError: INVALID_ARGUMENT, none.
        """
        if label not in self._assigned:
            raise invalid_argument(f"Unrecognized servable version label: {label}")
        return self._assigned[label]

    @property
    def assigned(self) -> dict[str, int]:
        """Label -> version, as requests may use them now."""
        return dict(self._assigned)

    def fault(self, labels: Mapping[str, int], available: Collection[int]) -> str:
        """Why `labels` may not be assigned now, in TensorFlow Serving's words; empty where they may."""
        for label, version in labels.items():
            moved = self._assigned.get(label, version) != version
            if version not in available and (moved or not self._allow_unavailable):
                what = f"Request to assign label to version {version} of model {self._model}"
                return f"{what}, which is not currently available for inference"
        return ""

    def assign(self, labels: Mapping[str, int]) -> None:
        """Have these labels, and no others."""
        self._assigned, self._waiting = dict(labels), {}

    def settle(self, available: Collection[int]) -> None:
        """Assign what waits for a version that is available now."""
        due = {label: version for label, version in self._waiting.items() if version in available}
        self._assigned.update(due)
        self._waiting = {label: version for label, version in self._waiting.items() if label not in due}
