"""`automodel examples ls | cp`: configs to start from.

An example is a YAML file in `examples/` whose first comment line says what it is. In an installed package they lie in
`automodel/_examples`, in a checkout at its root. Examples that come with a small dataset name it as `data/…`, and `cp`
takes it along, so the copy runs where it is put. Nothing that exists is ever replaced.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from automodel.config.errors import UserError
from automodel.config.writable import require_writable

app = typer.Typer(no_args_is_help=True, help="List and copy example configs.")

DATA = re.compile(r"^\s*(?:path|data_files|dataset|validation_dataset):\s*(data/\S+)\s*(?:#.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """One example config."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def description(self) -> str:
        """The first sentence of the file's opening comment."""
        comment = itertools.takewhile(lambda line: line.startswith("#"), self.path.open(encoding="utf-8"))
        text = " ".join(line.lstrip("# ").strip() for line in comment)
        return re.split(r"(?<=[.!?]) ", text, maxsplit=1)[0]

    def data(self) -> list[str]:
        """The small datasets it comes with, as it names them."""
        return sorted(set(DATA.findall(self.path.read_text(encoding="utf-8"))))


def examples_root() -> Path:
    """Where the examples are: inside an installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for root in (package / "_examples", package.parents[1] / "examples"):
        if root.is_dir():
            return root
    raise UserError("the examples are missing from this installation. Reinstall automodel.")


def all_examples() -> list[Example]:
    return [Example(path) for path in sorted(examples_root().rglob("*.yaml"), key=lambda path: path.stem)]


def find_example(name: str) -> Example:
    """By its name, with or without folder and ending."""
    wanted = Path(name).name.removesuffix(".yaml")
    known = {example.name: example for example in all_examples()}
    if wanted in known:
        return known[wanted]
    close = get_close_matches(wanted.replace("-", "_"), known, n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    raise UserError(f"there is no example `{name}`.{hint} `automodel examples ls` lists them.")


@app.command("ls")
def list_examples() -> None:
    """List the examples, each with what it shows."""
    found = all_examples()
    width = max(len(example.name) for example in found)
    for example in found:
        print(f"{example.name:<{width}}  {example.description}")
    print("\nCopy one with: automodel examples cp NAME")


@app.command("cp")
def copy_example(
    name: Annotated[str, typer.Argument(help="Name, as `automodel examples ls` shows it.")],
    dest: Annotated[Path, typer.Argument(help="Folder, or the new file's name.")] = Path(),
) -> None:
    """Copy an example, and the small dataset it may come with, to a folder or file of yours."""
    example = find_example(name)
    target = dest if dest.suffix in (".yaml", ".yml") else dest / example.path.name
    require_writable(target, "dest")
    copies = list(_copies(example, target))
    in_the_way = [new for old, new in copies if new.exists() and not _same(old, new)]
    if target.exists() and target not in in_the_way:
        in_the_way.insert(0, target)
    if in_the_way:
        raise UserError(
            f"{', '.join(map(str, in_the_way))} already exists and is not replaced. Name another file or folder: "
            f"automodel examples cp {example.name} another.yaml"
        )
    for old, new in copies:
        new.parent.mkdir(parents=True, exist_ok=True)
        if not new.exists():
            shutil.copyfile(old, new)
            print(f"Copied {new}")
    print(f"Run it with: automodel finetune llm -c {shlex.quote(target.name)}" + _from_where(target))


def _copies(example: Example, target: Path) -> Iterator[tuple[Path, Path]]:
    yield example.path, target
    for name in example.data():
        yield examples_root() / name, target.parent / name


def _same(one: Path, other: Path) -> bool:
    """A dataset that two examples share may be there already."""
    return one.suffix != ".yaml" and other.is_file() and one.read_bytes() == other.read_bytes()


def _from_where(target: Path) -> str:
    return "" if target.parent == Path() else f"   (in {target.parent})"
