"""What `python -m build` makes under dist/: its files, its metadata, and the wheel in an environment of its own."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import tpuembed
from tpuembed.native.lookup import VARIANTS

pytestmark = pytest.mark.nightly  # `make package` runs them too

ROOT = Path(__file__).parents[2]
FOLDERS = {"tpuembed": ROOT, "tpuembed_serving": ROOT / "serving", "tpuembed_cli": ROOT / "cli"}
HAS_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
LIBRARY = "tpuembed/native/_lookup.so"
CHECKPOINT = ROOT / "tests/golden/tfrs/no_optimizer/ckpt"


@pytest.fixture(scope="module")
def dist() -> Path:
    """Build dist/ anew, as a release does."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    built = subprocess.run([sys.executable, "-m", "build"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return ROOT / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> "Message[str, str]":
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def _tracked(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(listed.stdout.splitlines())


def test_the_metadata_is_what_package_indexes_accept(dist: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


def test_the_wheel_has_the_three_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = _tracked(*(str(folder.relative_to(ROOT) / name) for name, folder in FOLDERS.items()))
    packages = {path.removeprefix("serving/").removeprefix("cli/") for path in tracked}
    assert found == packages | ({LIBRARY} if HAS_COMPILER else set())
    platform = r"py3-none-(manylinux|musllinux|linux|macosx)_\w+\.whl" if HAS_COMPILER else r"py3-none-any\.whl"
    assert re.search(platform, wheel.name), wheel.name


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path, dist: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    others = shutil.ignore_patterns(".*", "dist", "build", "tests", "__pycache__", LIBRARY)
    shutil.copytree(ROOT, tmp_path / "source", ignore=others)
    command[-1] = str(tmp_path / "source")
    environment = {**os.environ, "CC": "no-such-compiler"}
    built = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "no-such-compiler could not run" in built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert LIBRARY not in archive.namelist()
    strict = subprocess.run(command, capture_output=True, text=True, env={**environment, "TPUEMBED_NATIVE": "1"})
    assert strict.returncode != 0
    assert "TPUEMBED_NATIVE=1, but lookup.c was not compiled" in strict.stdout + strict.stderr


def test_the_sdist_has_the_packages_the_documents_and_the_license_and_no_tests(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    wanted = _tracked("tpuembed", "serving", "cli", "docs", "examples", "*.md", "LICENSE", "pyproject.toml")
    assert found - {"PKG-INFO", ".gitignore"} == {
        path for path in wanted if not path.startswith(("tests/", "benchmarks/"))
    }


def test_links_of_the_readme_are_absolute_and_their_files_exist(metadata: "Message[str, str]") -> None:
    targets = re.findall(r"\]\(([^)]+)\)", str(metadata.get_payload()))
    assert len(targets) > 15
    for target in targets:
        assert target.startswith("https://"), target
        ours = re.match(
            r"https://(?:raw\.githubusercontent|github)\.com/tpuembed/tpuembed/(?:blob/)?main/([^#]+)", target
        )
        assert ours is None or (ROOT / ours[1]).is_file(), target


def test_the_python_versions_are_those_that_ci_runs(metadata: "Message[str, str]") -> None:
    named = [
        value.rpartition(" ")[2] for value in metadata.get_all("Classifier", []) if re.search(r":: 3\.\d+$", value)
    ]
    makefile = (ROOT / "Makefile").read_text()
    newest = re.search(r"^NEWEST_PYTHON \?= (\S+)$", makefile, re.MULTILINE)
    lowest = str(metadata["Requires-Python"]).removeprefix(">=")
    assert newest is not None
    assert named == [lowest, newest[1]]


def test_the_wheel_works_in_an_environment_without_tensorflow(wheel: Path, tmp_path: Path) -> None:
    programs = tmp_path / "venv" / "bin"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([*pip, "install", "--quiet", wheel], check=True, env=environment)

    def run(*arguments: str) -> str:
        command = [str(programs / "tpuembed"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version") == f"tpuembed, version {tpuembed.__version__}\n"
    commands = set(re.findall(r"^  ([a-z][a-z-]*) ", run("--help"), re.MULTILINE))
    assert {"demo", "describe", "export", "head", "serve", "sparsecore-limits", "verify"} <= commands
    for command in commands:
        assert "Usage: tpuembed " + command in run(command, "--help")
    assert re.search(r"video/table\.v1 +│ 11 +│ 4 ", run("describe", str(CHECKPOINT)))
    packages = subprocess.run([*pip, "freeze"], check=True, env=environment, capture_output=True, text=True).stdout
    assert "tensorflow" not in packages
    code = "from tpuembed.native import lookup; print(lookup.available() or lookup.variant())"
    found = subprocess.run(
        [programs / "python", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.stdout.strip() in VARIANTS or not HAS_COMPILER, found.stdout + found.stderr
    subprocess.run([*pip, "check"], check=True, env=environment)
