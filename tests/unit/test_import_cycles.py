"""Modules import each other in one direction only."""

import graphlib

import grimp
import pytest

PACKAGES = ("tpuembed", "tpuembed_serving", "tpuembed_cli")


def imports(*packages: str) -> dict[str, set[str]]:
    """The modules that each module imports."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_module_imports_itself_through_others() -> None:
    graphlib.TopologicalSorter(imports(*PACKAGES)).prepare()  # raises CycleError, which has the cycle


def test_a_cycle_is_found() -> None:
    found = imports(*PACKAGES)
    found["tpuembed.errors"].add("tpuembed.layer")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(found).prepare()
