"""What transformers' files export is read once, and again when they change."""

import importlib.util
import os
import types
from pathlib import Path

import pytest

from automodel.models.model_files import ModelFiles, copied, from_json, to_json

FOUND = {
    "albert": {frozenset(): {"configuration_albert": {"AlbertConfig"}}, frozenset({"torch"}): {"modeling": {"A", "B"}}},
    "auto": {"inner": {frozenset({"torch", "vision"}): {"x": set()}}},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    models = tmp_path / "models"
    (models / "albert").mkdir(parents=True)
    (models / "__init__.py").touch()
    return models


def process(folder, found=FOUND):
    """What a process that imports transformers gets for both of its questions, and how often it scanned."""
    scans = []

    def scan(path):
        scans.append(path)
        return copied(found)

    utils = types.SimpleNamespace(create_import_structure_from_path=scan)
    files = ModelFiles()
    with files.remembered():
        files.watch("somebody", utils)
        assert utils.create_import_structure_from_path is scan
        files.watch("transformers", utils)
        answers = [utils.create_import_structure_from_path(path) for path in (folder, str(folder / "__init__.py"))]
        answers[0]["albert"].clear()  # a reader may change what it was given
        answers[0] = utils.create_import_structure_from_path(folder)
    assert utils.create_import_structure_from_path is scan
    return answers, len(scans)


def test_one_scan_answers_both_questions_and_the_next_process(folder):
    assert process(folder) == ([FOUND, FOUND], 1)
    assert process(folder) == ([FOUND, FOUND], 0)


def test_a_changed_folder_is_scanned_again(folder):
    process(folder)
    (folder / "albert" / "modeling_new.py").touch()
    os.utime(folder / "albert", ns=(1, 1))
    assert process(folder, {"albert": {frozenset(): {"new": {"New"}}}})[1] == 1


@pytest.mark.parametrize("content", ["", "[1, 2", '{"of": 3}', '{"other": []}'])
def test_a_damaged_cache_is_scanned_again(folder, content):
    process(folder)
    (kept,) = (folder.parent / "cache").iterdir()
    kept.write_text(content)
    assert process(folder) == ([FOUND, FOUND], 1)


def test_nowhere_to_keep_it(folder, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", "/dev/null/cache")
    assert process(folder) == ([FOUND, FOUND], 1)


def test_transformers_own_structure_survives_the_round_trip():
    root = Path(importlib.util.find_spec("transformers").origin).parent
    from transformers.utils.import_utils import create_import_structure_from_path

    structure = create_import_structure_from_path(str(root / "models" / "bert"))
    assert from_json(to_json(structure)) == structure
    assert structure
