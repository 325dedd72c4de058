"""What is understood but not built: each key is named, nothing else is."""

from __future__ import annotations

import pytest

from automodel.plan.check import load_run_config, not_yet


@pytest.mark.parametrize(
    ("line", "paths"),
    [
        ("", []),
        ("peft: {dim: 8}", []),
        ("fp8: {recipe_name: rowwise}", ["fp8.recipe_name"]),
        ("fp8: {recipe_name: tensorwise}", []),
        ("fp8: {}", []),
        ("fp8: {enabled: false, recipe_name: rowwise}", []),
        ("distributed: {dp_size: none, tp_size: 1}", []),
        ("distributed: {dp_size: 1, strategy: ddp}", []),
        ("distributed: {dp_size: 4}", []),
        ("distributed: {dp_size: 4, tp_size: 2}\npeft: {dim: 8, use_dora: true}", ["peft.use_dora"]),
        ("distributed: {dp_size: 4, strategy: fsdp2, cpu_offload: true, reduce_dtype: bf16}", []),
        ("distributed: {dp_size: 4, strategy: fsdp2}\nfp8: {}", ["fp8"]),
        ("distributed: {dp_size: 4, strategy: fsdp2}\ncompile: {enabled: true}", ["compile"]),
        ("distributed: {dp_size: 1, strategy: fsdp2}", []),
        ("distributed: {dp_size: 4, _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager}", []),
        ("distributed: {dp_size: 4, reduce_dtype: float32}", []),
        ("distributed: {cp_size: 2, tp_size: 2, dp_replicate_size: 2, sequence_parallel: true}", []),
        ("packed_sequence: {packed_sequence_size: 4096}", []),
        ("benchmark: {repeat: 3}", []),
    ],
)  # fmt: skip
def test_not_yet(tmp_path, line, paths):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: bert\ndataset: x.csv\n{line}\n")
    found = not_yet(load_run_config([path]))
    assert [p.path for p in found] == paths
    assert all("later release" in p.message for p in found)


def test_several_ranks(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: bert\ndataset: x.csv\n")
    assert not_yet(load_run_config([path]), world_devices=2) == []
    path.write_text("model: bert\ndataset: x.csv\ndistributed: {strategy: fsdp2}\n")
    assert not_yet(load_run_config([path])) == []
    assert not_yet(load_run_config([path]), world_devices=2) == []
