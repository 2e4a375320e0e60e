"""models.config: every field is honoured, or refused by name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed_serving.models.config import FieldError, models_from_message, parse_models, read_models
from tpuembed_serving.models.policies import AllVersions, LatestVersions, SpecificVersions
from tpuembed_serving.settings import ModelSettings

WHOLE = """
# Two ways to write most things.
model_config_list {
  config {
    name: "rec"
    base_path: "/models/rec"
    model_platform: "tensorflow"
    model_version_policy { specific { versions: 42 versions: 43 } }
    version_labels { key: "stable" value: 42 }
    version_labels { key: 'canary', value: 43 }
  }
  config: <
    name: 'al' "l"
    base_path: "/models/{all} # \\"x\\""
    model_type: TENSORFLOW;
    model_version_policy: { all: {} }
  >
  config { name: "two", base_path: "/models/two", model_platform: "tensorflow",
           model_version_policy { latest { num_versions: 2 } } }
  config { name: "one" base_path: "/models/one" model_platform: "tensorflow" model_version_policy { latest {} } }
  config { name: "none" base_path: "/models/none" model_platform: "tensorflow" }
}
"""


def test_every_field() -> None:
    assert parse_models(WHOLE, "f") == (
        ModelSettings(
            name="rec",
            base_path=Path("/models/rec"),
            policy=SpecificVersions(frozenset({42, 43})),
            labels={"stable": 42, "canary": 43},
        ),
        ModelSettings(name="all", base_path=Path('/models/{all} # "x"'), policy=AllVersions()),
        ModelSettings(name="two", base_path=Path("/models/two"), policy=LatestVersions(2)),
        ModelSettings(name="one", base_path=Path("/models/one"), policy=LatestVersions(1)),
        ModelSettings(name="none", base_path=Path("/models/none"), policy=LatestVersions(1)),
    )


def test_labels_have_one_order_in_every_process() -> None:
    labels = "".join(f'version_labels {{ key: "{label}" value: 1 }} ' for label in "gbhadfce")
    (model,) = parse_models(
        f'model_config_list {{ config {{ name: "m" base_path: "/m" model_platform: "tensorflow" {labels} }} }}', "f"
    )
    assert list(model.labels) == list("abcdefgh")


def test_a_list_of_messages() -> None:
    text = 'model_config_list { config: [\n{name: "a" base_path: "/a" model_platform: "tensorflow"},\n{name: "b"}] }'
    with pytest.raises(ConfigError) as caught:
        parse_models(text, "f")
    assert str(caught.value).startswith("config f, field model_config_list.config[1].model_platform: ")


def test_no_model_at_all() -> None:
    assert parse_models("model_config_list {}", "f") == ()
    for text in ("", "# models of the shop\n"):
        with refused(ConfigError, match="model_config_list"):
            parse_models(text, "f")


CONFIG = "model_config_list.config[0]"
SOUND = 'base_path: "/m" model_platform: "tensorflow"'


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ('model_platform: "tensorflow"\n\n base_path: "m"\n', f"field {CONFIG}.base_path: "),
        ('model_platform: "tensorflow"', f"field {CONFIG}.base_path: "),
        ('model_platform: "tensorflow"\nbase_path: "http://b/m"', f"field {CONFIG}.base_path: "),
        ('base_path: "/m"\nmodel_platform: "torch"', f"field {CONFIG}.model_platform: "),
        ('base_path: "/m"', f"field {CONFIG}.model_platform: "),
        (f"{SOUND}\nmodel_type: TENSORFLOW", f"field {CONFIG}.model_type: "),
        ('base_path: "/m"\nmodel_type: OTHER', f"field {CONFIG}.model_type: "),
        (
            f"{SOUND}\nlogging_config {{ sampling_config {{ sampling_rate: 1 }} }}",
            f"field {CONFIG}.logging_config.log_collector_config.filename_prefix: ",
        ),
        (f"{SOUND}\nmodel_version_policy {{\n specific {{}} }}", f"field {CONFIG}.model_version_policy.specific: "),
        (
            f'{SOUND}\nversion_labels {{ key: "a" value: 1 }}\nversion_labels {{ key: "a" value: 2 }}',
            f"field {CONFIG}.version_labels: ",
        ),
        (f"{SOUND}\nversion_labels {{ value: 1 }}", f"field {CONFIG}.version_labels: "),
        (f'{SOUND} }}\nconfig {{\n name: "m" {SOUND}', "field model_config_list.config[1].name: "),
        (f"{SOUND} }} config {{ {SOUND}", "field model_config_list.config[1].name: "),
    ],
)
def test_what_is_refused_by_name(body: str, where: str) -> None:
    with refused(ConfigError, match=rf"^config f, {re.escape(where)}"):
        parse_models(f'model_config_list {{\n  config {{\n    name: "m" {body}\n  }}\n}}\n', "f")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('nam: "x"', 'line 3, column 15: .*"tensorflow.serving.ModelConfig" has no field named "nam"'),
        ('name: "n"', 'line 3, column 21: .*should not have multiple "name"'),
        (f"{SOUND}\nmodel_version_policy {{ latest {{ num_versions: -1 }} }}", "line 4, column 47: "),
        (
            f"{SOUND}\nmodel_version_policy {{ all {{}} latest {{}} }}",
            'line 4, column 31: .*"latest" is specified along with field "all"',
        ),
    ],
)
def test_what_is_refused_by_its_line(body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config f, {message}") as caught:
        parse_models(f'model_config_list {{\n  config {{\n    name: "m" {body}\n  }}\n}}\n', "f")
    assert len(str(caught.value).splitlines()) == 1


def test_an_open_brace_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "models.config"
    path.write_text("model_config_list {", encoding="utf-8")
    with refused(ConfigError):
        read_models(path)
    path.write_bytes(b"\xff\xfe")
    with refused(ConfigError):
        read_models(path)
    with refused(ConfigError):
        read_models(Path(f"{path}.none"))


def test_a_custom_config() -> None:
    with refused(ConfigError, match="custom_model_config"):
        parse_models('\ncustom_model_config { type_url: "t" }', "f")


def test_a_message_says_its_field() -> None:
    from tensorflow_serving.config import model_server_config_pb2

    message = model_server_config_pb2.ModelServerConfig()
    message.model_config_list.config.add(name="m", base_path="m", model_platform="tensorflow")
    with pytest.raises(FieldError) as caught:
        models_from_message(message)
    assert caught.value.field == "model_config_list.config[0].base_path"
    assert str(caught.value) == "Expected model m to have an absolute path or URI; got base_path()=m"


def test_reading_one_imports_no_tensorflow() -> None:
    code = "import sys; from tpuembed_serving.models.config import parse_models as parse; parse('model_config_list {}', 'f'); "
    code += "print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
