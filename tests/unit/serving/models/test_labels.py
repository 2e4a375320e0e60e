"""Labels of a model's versions."""

from tpuembed_serving.models.labels import VersionLabels


def test_labels_are_in_their_own_order_whichever_version_loads_first() -> None:
    labels = VersionLabels("m", {"a": 1, "b": 2}, allow_unavailable=False)
    labels.settle([2])
    labels.settle([1, 2])
    assert list(labels.assigned.items()) == [("a", 1), ("b", 2)]
