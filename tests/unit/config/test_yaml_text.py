"""YAML that is not read as a config ends in one kind of error."""

from __future__ import annotations

import pytest
import yaml

from automodel.config.errors import UserError
from automodel.config.yaml_text import parse_yaml
from automodel.migrate.other_tools import read_yaml
from automodel.plan.places import homes_of, run_folder_of

BAD = {"deep": "a: " + "[" * 5000, "a date": "a: 2024-13-45", "digits": "a: " + "9" * 5000, "cut": "a: [1,"}


@pytest.mark.parametrize("name", BAD)
def test_whatever_is_wrong_is_no_yaml(name, tmp_path):
    with pytest.raises(yaml.YAMLError):
        parse_yaml(BAD[name])
    (tmp_path / "run").mkdir()
    config = tmp_path / "run" / "config.yaml"
    config.write_text(BAD[name])
    assert homes_of(config) == ()
    assert run_folder_of(config) is None
    with pytest.raises(UserError, match="is not YAML"):
        read_yaml(config)


def test_letters_of_an_old_encoding(tmp_path):
    (tmp_path / "axolotl.yaml").write_bytes(b"base_model: caf\xe9\n")
    with pytest.raises(UserError, match="is not YAML"):
        read_yaml(tmp_path / "axolotl.yaml")
