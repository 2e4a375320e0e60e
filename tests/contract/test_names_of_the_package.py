"""What a program can import, what an import costs, and the tree of errors."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import tensorflow as tf  # noqa: F401 - configure_tpu refuses where it is loaded

import tpuembed
from tests.support.serving.process import SCRIPT
from tpuembed import errors

CONTRACT = {
    *("TPUEmbedding", "TableConfig", "FeatureConfig", "TableInfo", "Vocabulary", "TpuEmbedError"),
    *("SGD", "Adagrad", "AdagradMomentum", "Adam", "FTRL", "QuantizationConfig"),
    *("open_checkpoint", "export_saved_model", "export_retrieval", "ExportCallback", "ExportReport", "configure_tpu"),
}

BASES: Mapping[str, type[BaseException]] = {
    "ConfigError": ValueError,
    "MissingExtraError": ImportError,
    "UnknownTableError": KeyError,
    "RowRangeError": IndexError,
    "CheckpointNotFoundError": FileNotFoundError,
    "TrainingError": RuntimeError,
}
"""Errors that programs may also catch as Python's own."""


def run(*command: str | Path, stubs: Path | None = None, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own. Packages in the folder `stubs` come before the installed ones."""
    path = os.pathsep.join([*([str(stubs)] if stubs else []), *(folder for folder in sys.path if folder)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, env=environment)


def stub(folder: Path, code: str, *packages: str) -> Path:
    """Write packages whose import runs `code`."""
    for package in packages:
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def deadly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TensorFlow and a Keras that end the process that imports them."""
    return stub(tmp_path_factory.mktemp("deadly"), "import os\nos._exit(97)\n", "tensorflow", "keras")


def test_help_imports_no_tensorflow(deadly: Path) -> None:
    for arguments in ("--help", "--version", "export --help", "serve --help", "demo --help"):
        done = run(SCRIPT, *arguments.split(), stubs=deadly)
        assert (done.returncode, done.stderr) == (0, ""), arguments
        assert done.stdout, arguments


def test_the_import_and_the_configs_need_no_tensorflow(deadly: Path) -> None:
    code = """
import tpuembed, tpuembed.errors
table = tpuembed.TableConfig(9, 2, "t", optimizer=tpuembed.Adagrad(0.1))
feature = tpuembed.FeatureConfig(table, vocabulary=tpuembed.Vocabulary(["a"]))
tpuembed.open_checkpoint, dir(tpuembed)
print(feature.vocabulary.get_vocabulary())
"""
    done = run(sys.executable, "-c", code, stubs=deadly)
    assert (done.returncode, done.stdout) == (0, "['a']\n"), done.stderr
    assert run(sys.executable, "-c", "import tpuembed; tpuembed.TPUEmbedding", stubs=deadly).returncode == 97


def test_without_tensorflow_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'tensorflow'\", name='tensorflow')\n"
    code = """
import tpuembed
try:
    tpuembed.TPUEmbedding
except tpuembed.TpuEmbedError as error:
    print(isinstance(error, ImportError), error)
"""
    done = run(sys.executable, "-c", code, stubs=stub(tmp_path, missing, "tensorflow"))
    assert done.stdout.startswith("True ")
    assert "pip install 'tpuembed[tf]'" in done.stdout


def test_every_public_name_exists_and_is_typed() -> None:
    """A checker reads annotations only with py.typed, and `Any` where one is missing."""
    assert len(set(tpuembed.__all__)) == len(tpuembed.__all__)
    assert set(tpuembed.__all__) >= CONTRACT
    assert set(dir(tpuembed)) >= CONTRACT
    assert (Path(tpuembed.__file__).parent / "py.typed").is_file()
    for name in tpuembed.__all__:
        value = getattr(tpuembed, name)
        assert value.__doc__, name
        if not callable(value):
            continue
        signature = inspect.signature(value.__init__ if inspect.isclass(value) else value)
        if signature.parameters.keys() == {"self", "args", "kwargs"}:  # an exception of Python's form
            continue
        for parameter in list(signature.parameters.values())[inspect.isclass(value) :]:
            assert parameter.annotation is not parameter.empty, f"{name}: {parameter}"
    with pytest.raises(AttributeError, match="'nonsense'"):
        tpuembed.nonsense  # noqa: B018


def test_every_error_derives_from_one() -> None:
    found = {name: value for name, value in vars(errors).items() if inspect.isclass(value) and not name.startswith("_")}
    kinds = {
        name: kind
        for name, kind in found.items()
        if issubclass(kind, BaseException) and kind is not errors.TrainingWarning
    }
    assert {"ConfigError", "CheckpointError", "ExportError", "ServingError"} <= kinds.keys()
    for name, kind in kinds.items():
        assert issubclass(kind, tpuembed.TpuEmbedError), name
        if name in errors.__all__:
            assert kind.__doc__, name
    for name, base in BASES.items():
        assert issubclass(kinds[name], base)
    assert str(errors.UnknownTableError("no table 'a'")) == "no table 'a'"  # a KeyError would quote it


def test_the_package_of_compat_has_modules_of_its_own() -> None:
    for name in ("tfrs", "keras_rs"):
        module = importlib.import_module(f"tpuembed.compat.{name}")
        assert all(hasattr(module, public) for public in module.__all__)


# ---- configure_tpu

TPU_VARIABLES = {
    "PJRT_DEVICE": "TPU",
    "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
    "TF_XLA_FLAGS": (  # as the tutorial of keras-rs sets them
        "--tf_mlir_enable_mlir_bridge=true --tf_mlir_enable_convert_control_to_data_outputs_pass=true "
        "--tf_mlir_enable_merge_control_flow_pass=true"
    ),
}
CONFIGURE = """
import json, os, sys, tpuembed
try:
    tpuembed.configure_tpu()
except tpuembed.TpuEmbedError as error:
    sys.exit(str(error))
print(json.dumps(dict(os.environ)))
"""


def test_configure_tpu_sets_the_variables_of_a_sparse_core_machine(tmp_path: Path, deadly: Path) -> None:
    library = tmp_path / "libtpu" / "libtpu.so"
    stubs = stub(tmp_path, f"def get_library_path(): return {str(library)!r}\n", "libtpu")
    library.touch()
    (tmp_path / "tensorflow").symlink_to(deadly / "tensorflow")
    unset = f"import os\nfor name in {[*TPU_VARIABLES, 'KERAS_BACKEND']}: os.environ.pop(name, None)\n"
    done = run(sys.executable, "-c", unset + CONFIGURE, stubs=stubs)
    found: dict[str, str] = json.loads(done.stdout)
    for name, value in {**TPU_VARIABLES, "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": str(library)}.items():
        assert found[name] == value


def test_configure_tpu_refuses_where_it_would_have_no_effect() -> None:
    before = dict(os.environ)
    with pytest.raises(tpuembed.TpuEmbedError, match="TensorFlow is already imported"):
        tpuembed.configure_tpu()
    assert dict(os.environ) == before
    missing = run(sys.executable, "-c", CONFIGURE)
    assert missing.returncode == 1
    assert "pip install 'tpuembed[tpu]'" in missing.stderr
