"""A local Hugging Face cache, made for a test, that the real loading code reads while offline.

    cache = HfCache(tmp_path / "hf")
    cache.add_dataset("imdb", {"train": rows, "test": rows})
    cache.add_model("distilbert-base-uncased", folder)
    subprocess.run([...], env=cache.env())

It is laid out as a machine that once downloaded these things would have it:

    hub/models--distilbert-base-uncased/{refs/main, blobs/<sha>, snapshots/<commit>/<file> -> ../../blobs/<sha>}
    hub/datasets--imdb/{refs/main, blobs, snapshots/<commit>/{README.md, data/train-00000-of-00001.parquet}}
    datasets/imdb/default/0.0.0/<commit>/{dataset_info.json, imdb-train.arrow}      (what load_dataset prepared)

Environment variables are read when the libraries are imported, so `env()` is for subprocesses; `activate(monkeypatch)`
does the same for this process.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any


class HfCache:
    """A cache under `home`, to be used as HF_HOME."""

    def __init__(self, home: Path):
        self.home = Path(home)
        self.hub = self.home / "hub"
        self.tables = self.home / "datasets"
        for folder in (self.hub, self.tables):
            folder.mkdir(parents=True, exist_ok=True)

    def env(self, **more: str) -> dict[str, str]:
        """The environment of a process that must find everything here and may not ask the hub."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_", "TRANSFORMERS_"))}
        offline = {"HF_HOME": str(self.home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        return {**inherited, **offline, **more}

    def activate(self, monkeypatch: Any) -> None:
        """The same for this process: the libraries' constants are pointed here until the test ends."""
        import datasets.config
        import huggingface_hub.constants as hub

        for name, value in self.env().items():
            monkeypatch.setenv(name, value)
        for module, name, value in (
            (hub, "HF_HOME", str(self.home)),
            (hub, "HF_HUB_CACHE", str(self.hub)),
            (hub, "HF_HUB_OFFLINE", True),
            (datasets.config, "HF_DATASETS_CACHE", str(self.tables)),
            (datasets.config, "HF_HUB_OFFLINE", True),
        ):
            monkeypatch.setattr(module, name, value)

    def add_model(self, name: str, folder: Path | str) -> Path:
        """A model or tokenizer folder under its hub name. Returns the snapshot's folder."""
        files = {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}
        return self._add_repository("models", name, files)

    def add_dataset(
        self, name: str, splits: dict[str, Any], *, config: str = "default", features: Any = None, prepared: bool = True
    ) -> Path:
        """A dataset under its hub name; `splits` holds lists of records, or `datasets.Dataset`s. `prepared=False`
        leaves out the tables that `load_dataset` would have made of the downloaded files."""
        import io

        import datasets

        files: dict[str, bytes] = {}
        for split, rows in splits.items():
            table = rows if isinstance(rows, datasets.Dataset) else datasets.Dataset.from_list(rows, features=features)
            buffer = io.BytesIO()
            table.to_parquet(buffer)
            files[f"data/{split}-00000-of-00001.parquet"] = buffer.getvalue()
        paths = "\n".join(f"  - split: {split}\n    path: data/{split}-*" for split in splits)
        readme = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{paths}\n---\n# {name}\n"
        snapshot = self._add_repository("datasets", name, {"README.md": readme.encode(), **files})
        if prepared:
            self._prepare(name, config, snapshot, list(splits))
        return snapshot

    def _add_repository(self, kind: str, name: str, files: dict[str, bytes]) -> Path:
        commit = hashlib.sha1(
            repr(sorted((n, hashlib.sha1(b).hexdigest()) for n, b in files.items())).encode()
        ).hexdigest()
        root = self.hub / f"{kind}--{name.replace('/', '--')}"
        snapshot = root / "snapshots" / commit
        for relative, content in files.items():
            blob = root / "blobs" / hashlib.sha256(content).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(content)
            link = snapshot / relative
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(commit)
        return snapshot

    def _prepare(self, name: str, config: str, snapshot: Path, splits: list[str]) -> None:
        """The tables of `load_dataset`, made by the same builder that it uses for a downloaded parquet repository."""
        from datasets.packaged_modules.parquet.parquet import Parquet
        from datasets.utils import disable_progress_bars, enable_progress_bars

        folder = self.tables / "___".join(name.split("/")) / config / "0.0.0" / snapshot.name
        shutil.rmtree(folder, ignore_errors=True)
        builder = Parquet(
            dataset_name=name.split("/")[-1],
            config_name=config,
            hash=snapshot.name,
            data_files={split: [str(p) for p in sorted((snapshot / "data").glob(f"{split}-*"))] for split in splits},
            cache_dir=str(self.home / "scratch"),
        )
        disable_progress_bars()
        try:
            builder.download_and_prepare(output_dir=str(folder))
        finally:
            enable_progress_bars()
        shutil.rmtree(self.home / "scratch", ignore_errors=True)
