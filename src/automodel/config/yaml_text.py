"""YAML as plain values, for files that are not read as configs. (`read.py` reads those, with their lines.)"""

from __future__ import annotations

from typing import Any

import yaml


def parse_yaml(text: str, loader: type[Any] = yaml.SafeLoader) -> Any:
    """As `yaml.safe_load`. Whatever is wrong with the text raises `YAMLError`: PyYAML lets other errors through for
    dates that do not exist, numbers of thousands of digits, and lists that are thousands of levels deep."""
    try:
        return yaml.load(text, loader)
    except RecursionError:
        raise yaml.YAMLError("keys and lists lie inside each other without end") from None
    except (ValueError, OverflowError) as error:
        raise yaml.YAMLError(str(error)) from error
