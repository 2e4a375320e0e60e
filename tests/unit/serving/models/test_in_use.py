"""What a models.config and the status of a server say about the versions in a folder."""

import json
from pathlib import Path

import pytest

from tests.support.messages import refused
from tests.support.serving.answering import answering
from tpuembed.errors import ConfigError, ServingError
from tpuembed_serving import versions_in_use
from tpuembed_serving.models.in_use import VersionUse, find_uses

# As TensorFlow Serving 2.19 answers GET /v1/models/NAME.
STATUS = """{
 "model_version_status": [
  {"version": "4", "state": "LOADING", "status": {"error_code": "OK", "error_message": ""}},
  {"version": "3", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}},
  {"version": "2", "state": "UNLOADING", "status": {"error_code": "OK", "error_message": ""}},
  {"version": "1", "state": "END", "status": {"error_code": "OK", "error_message": ""}}
 ]
}"""


def config(path: Path, base_path: Path, *fields: str, name: str = "rec") -> Path:
    one = f'name: "{name}" base_path: "{base_path}" model_platform: "tensorflow" {" ".join(fields)}'
    path.write_text(f"model_config_list {{ config {{ {one} }} }}")
    return path


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        ([], {5}),
        (["model_version_policy { latest { num_versions: 2 } }"], {4, 5}),
        (["model_version_policy { specific { versions: 2 versions: 9 } }"], {2}),
        (["model_version_policy { all {} }"], {1, 2, 3, 4, 5}),
        (['version_labels { key: "stable" value: 3 }', 'version_labels { key: "gone" value: 8 }'], {3, 5}),
    ],
)
def test_a_config_uses_what_its_policy_selects_and_what_has_a_label(
    tmp_path: Path, fields: list[str], used: set[int]
) -> None:
    file = config(tmp_path / "models.config", tmp_path / "rec", *fields)
    assert set(versions_in_use(tmp_path / "rec", {1, 2, 3, 4, 5}, configs=[file])) == used


def test_a_label_is_told_from_the_policy(tmp_path: Path) -> None:
    file = config(tmp_path / "models.config", tmp_path / "rec", 'version_labels { key: "stable" value: 1 }')
    assert find_uses(tmp_path / "rec", {1, 2}, [file]) == [
        VersionUse(2, f"policy of rec in {file}"),
        VersionUse(1, f"label stable of rec in {file}", "stable"),
    ]


def test_a_folder_has_several_names(tmp_path: Path) -> None:
    (tmp_path / "rec").mkdir()
    (tmp_path / "alias").symlink_to("rec")
    file = config(tmp_path / "models.config", tmp_path / "alias")
    assert set(versions_in_use(tmp_path / "rec", {1, 2}, configs=[file])) == {2}


def test_a_config_of_a_container_is_matched_by_name(tmp_path: Path) -> None:
    file = config(tmp_path / "models.config", Path("/models/rec"))
    with refused(ConfigError, match="/models/rec"):
        versions_in_use(tmp_path / "rec", {1, 2}, configs=[file])
    assert set(versions_in_use(tmp_path / "rec", {1, 2}, configs=[file], model="rec")) == {2}
    with refused(ConfigError, match="other"):
        versions_in_use(tmp_path / "rec", {1, 2}, configs=[file], model="other")


def test_a_server_uses_what_it_has_not_unloaded(tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []
    with answering(200, STATUS, asked) as url:
        found = versions_in_use(tmp_path / "rec", {1, 2, 3, 4}, servers=[url])
        versions_in_use(tmp_path / "rec", {1}, servers=[f"{url}/"], model="a b", api_key="secret")
        versions_in_use(tmp_path / "rec", {1}, servers=[f"{url}/v1/models/other"])
    assert found == {4: f"LOADING at {url}", 3: f"AVAILABLE at {url}", 2: f"UNLOADING at {url}"}
    assert asked == [("/v1/models/rec", None), ("/v1/models/a%20b", "Bearer secret"), ("/v1/models/other", None)]


def test_all_uses_of_a_version_are_named(tmp_path: Path) -> None:
    file = config(tmp_path / "models.config", tmp_path / "rec")
    with answering(200, STATUS) as url:
        found = versions_in_use(tmp_path / "rec", {2, 3}, configs=[file], servers=[url])
    assert found == {3: f"policy of rec in {file}, AVAILABLE at {url}", 2: f"UNLOADING at {url}"}


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (404, '{"error": "Servable not found for request: Latest(rec)"}'),
        (401, "{}"),
        (403, "{}"),
        (500, ""),
        (200, "<html>"),
        (200, "[]"),
        (200, json.dumps({"model_version_status": [{"version": "one", "state": "AVAILABLE"}]})),
    ],
)
def test_a_server_that_does_not_say_is_an_error(
    tmp_path: Path, code: int, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(code, body) as url, refused(ServingError):
        versions_in_use(tmp_path / "rec", {1}, servers=[url])


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with answering(200, STATUS) as url:
        pass
    with refused(ServingError, match="127.0.0.1"):
        versions_in_use(tmp_path / "rec", {1}, servers=[url])


@pytest.mark.parametrize("url", ["localhost:8501", "file:///etc/passwd", "", "http://", "http://[::1"])
def test_a_server_is_named_by_its_url(tmp_path: Path, url: str) -> None:
    with refused(ConfigError):
        versions_in_use(tmp_path / "rec", {1}, servers=[url])


def test_a_config_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with refused(ConfigError):
        versions_in_use(tmp_path / "rec", {1}, configs=[tmp_path / "missing"])
