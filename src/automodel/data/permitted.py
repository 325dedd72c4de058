"""What a config may have read: files here and names on the hub, by readers that only parse.

`datasets` has packaged builders for many formats, and in some of its versions one of them (`pandas`) unpickles, which
runs code. `BUILDERS` are the ones that are used here; all others are refused before `datasets` sees them. An address
(`https://…`, `s3://…`) is fetched only where the command line says `--allow-remote-data`: a config may come from
anywhere, and what it has fetched tells a stranger where it runs, and may come from inside a private network.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from automodel.config.errors import UserError
from automodel.data.config import BUILDERS, PATTERN
from automodel.data.problems import Problems

OTHER_BUILDERS = frozenset(
    "audiofolder cache conll eval fasta fastq folder_based_builder genbank generator harbor hdf5 iceberg imagefolder "  # noqa: SIM905
    "lance meshfolder mmcif niftifolder pandas pdb pdffolder spark sql tsfile videofolder vortex webdataset xml".split()
)
"""Packaged builders of `datasets` 4 and 5 that are not used here; later versions may add to them."""
SCHEMES = ("http", "https", "ftp", "s3", "gs", "gcs", "az", "abfs", "hf")
"""Addresses that `--allow-remote-data` opens. fsspec knows more: some of them run what they read (`reference`)."""

_ADDRESS = re.compile(r"[A-Za-z][\w.+-]*://|.*::")
_SCHEME = re.compile(r"[A-Za-z][\w.+-]*:")


def is_address(place: str) -> bool:
    """Whether a place is an address, and no path. fsspec chains several with `::`."""
    return _ADDRESS.match(place) is not None and not os.path.exists(os.path.expanduser(place))


def is_refused_builder(path: str) -> bool:
    """Whether `datasets` would take this path for a packaged builder that is not used here."""
    return path not in BUILDERS and (path in OTHER_BUILDERS or path in _of_this_version())


def _of_this_version() -> frozenset[str]:
    """The packaged builders of the version that is imported; none where it is not yet."""
    packaged = sys.modules.get("datasets.packaged_modules")
    return frozenset(getattr(packaged, "_PACKAGED_DATASETS_MODULES", ()))


def check(part: Any, section: str, *, remote: bool) -> None:
    """Raises `UserError` with everything in a section that may not be read. `remote`: whether the command line allows
    addresses in `data_files`."""
    problems = Problems()
    for key, message in refusals(part, remote=remote):
        problems.found.append(UserError(f"{section}.{key}: {message}"))
    problems.raise_if_any()


def refusals(part: Any, *, remote: bool) -> Iterator[tuple[str, str]]:
    """Keys of a section, or of an entry of a mixture, that would have something read that may not be, each with why."""
    path, has_maker = part.path or "", getattr(part, "has_maker", False)
    here = bool(path) and os.path.exists(os.path.expanduser(path))
    if not has_maker and is_address(path):
        yield "path", f"'{shown(path)}' is an address; {_instead_of_address(path)}"
    elif not has_maker and not here and is_refused_builder(path):
        yield "path", builder_refused(path)
    files = (part.data_files,) if isinstance(part.data_files, str) else part.data_files or ()
    for file in files:
        if message := _file_refused(file, path, has_maker=has_maker, here=here, remote=remote):
            yield "data_files", message
    if not has_maker:
        yield from _arguments_refused(getattr(part, "extra", {}), remote)


def builder_refused(path: str) -> str:
    usable = ", ".join(sorted(BUILDERS))
    return (
        f"'{path}' is a reader of `datasets` that is not used here: a config may only have files read by {usable}, "
        f"which run no code. Convert the files, e.g. to Parquet, and name them; a folder is written './{path}'."
    )


def _instead_of_address(path: str) -> str:
    format = next((name for name in sorted(BUILDERS) if path.lower().split("?")[0].endswith(name)), "csv")
    return (
        "files are read from disks, and the hub's datasets by name. Download it and give its path; or write "
        f"`path: {format}`, put the address into data_files, and add --allow-remote-data to the command line."
    )


def _file_refused(file: str, path: str, *, has_maker: bool, here: bool, remote: bool) -> str | None:
    """Why an entry of `data_files` may not be read; None where it may."""
    if is_address(file):
        return _address_refused(file, path, has_maker, remote)
    on_the_hub = bool(path) and not (has_maker or here or path in BUILDERS or is_address(path))
    outside = os.path.isabs(os.path.expanduser(file)) or ".." in file.split("/") or _SCHEME.match(file)
    if on_the_hub and outside and not any(sign in path for sign in PATTERN):
        return f"'{file}' chooses files of '{path}' on the hub, so it is a name or pattern inside of it: data/*.csv."
    return None


def _address_refused(file: str, path: str, has_maker: bool, remote: bool) -> str | None:
    scheme = file.split(":")[0].lower()
    if "::" in file or scheme not in SCHEMES:
        usable = ", ".join(SCHEMES[:4])
        plain = " Write the path without file://." if scheme == "file" else f" Addresses of {usable}, … can be."
        return f"'{shown(file)}' is of a kind that is not read.{plain}"
    if not remote:
        return (
            f"'{shown(file)}' is an address, and a config alone cannot have anything fetched. Download it and give the "
            "path of the file, or add --allow-remote-data to the command line."
        )
    if has_maker:
        return None
    if path not in BUILDERS:
        return f"'{shown(file)}' is an address; name its format as the path: one of {', '.join(sorted(BUILDERS))}."
    if any(sign in urlsplit(file).path for sign in PATTERN):
        return f"'{shown(file)}' is a pattern; addresses name one file each. List them."
    return None


def _arguments_refused(extra: dict[str, Any], remote: bool) -> Iterator[tuple[str, str]]:
    folder = extra.get("data_dir")
    if isinstance(folder, str) and (is_address(folder) or _SCHEME.match(folder) or os.path.isabs(folder)):
        yield "data_dir", f"'{shown(folder)}' names a folder inside of a dataset on the hub. Write it as it is there."
    if extra.get("storage_options") and not remote:
        elsewhere = "can send requests, and the token with them, to another place, which a config alone cannot allow"
        yield "storage_options", f"{elsewhere}. Remove it, or add --allow-remote-data to the command line."


def shown(address: str) -> str:
    """An address without what may be secret in it: names and passwords before the host, and everything after `?`."""
    bare = re.sub(r"(?<=://)[^/@]*@", "", address)
    return bare.split("?")[0].split("#")[0]
