"""Names of datasets on the hub. The check of a config imports this file before torch and numpy are loaded."""

from __future__ import annotations

from pathlib import Path

from automodel.config.run_folders import could_be_on_hub, holds_runs


def names_the_hub(path: str, folder: Path | None = None) -> bool:
    """Whether a path means a dataset on the hub although there is a folder of that name: runs have written into the
    folder, and it holds no data."""
    folder = folder or Path(path)
    if not could_be_on_hub(path) or not folder.is_dir() or not holds_runs(folder):
        return False
    from automodel.data.files import data_files

    saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    return not saved and not data_files(folder)
