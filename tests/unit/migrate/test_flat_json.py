"""Flat settings of other tools are a config already; who gives them to `migrate` is told, and loses no key."""

from __future__ import annotations

import json

import pytest

from automodel.config.errors import UserError
from automodel.migrate.saved import migrate_saved, read_json


def test_flat_settings_are_sent_to_the_config(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"use_4bit": True, "bf16": True, "lora_r": 16}))
    with pytest.raises(UserError) as caught:
        migrate_saved(file)
    assert str(caught.value) == (
        f"{file} holds flat settings (lora_r, use_4bit), which need no migration: they are a config as they are. "
        f"`automodel config show -c {file}` shows them in their sections; add `-c` with model and dataset where they "
        "name none."
    )
    file.write_text('{"lora_r": 16  // instead of 64\n}')
    with pytest.raises(UserError, match="Flat settings with comments need no migration"):
        migrate_saved(file)


def test_arguments_of_trl_are_saved_arguments(tmp_path):
    file = tmp_path / "training_args.json"
    file.write_text(json.dumps({"packing": True, "learning_rate": 1e-4} | {f"field_{n}": n for n in range(100)}))
    assert read_json(file)["packing"] is True


def test_what_trl_adds_to_saved_arguments_is_carried_over(tmp_path):
    trl = pytest.importorskip("trl")
    file = tmp_path / "training_args.json"
    args = trl.SFTConfig("out", max_length=256, packing=True, assistant_only_loss=True, bf16=False, use_cpu=True)
    file.write_text(args.to_json_string())
    document = migrate_saved(file)
    assert document.get("dataset.max_length") == document.get("packed_sequence.packed_sequence_size") == 256
    assert document.get("dataset.answer_only_loss") is True
    assert document.get("dataset.text_column") is None
    assert not document.left_out
