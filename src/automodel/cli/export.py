"""`automodel export RUN --merge --out DIR`: the model of an adapter run as a plain Hugging Face folder; with
`--stack ADAPTER`, several adapters as one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from automodel.cli.options import RemoteData, Trust, allowed
from automodel.config.errors import UserError

app = typer.Typer(help="Write the model of an adapter run as a plain Hugging Face folder.")


@app.command("export", no_args_is_help=True)
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder with an adapter, or any PEFT folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; must be new or empty.")],
    merge: Annotated[bool, typer.Option("--merge", help="Add the adapter to its base model.")] = False,
    stack: Annotated[
        list[str] | None,
        typer.Option("--stack", help="Another adapter of the same base, to add to the first: FOLDER or FOLDER=WEIGHT."),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Precision of the weights; the base's by default.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Text to check the merge on, instead of the run's data.")
    ] = None,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Merge an adapter into its base model, and check the result.

    The folder that is written is loaded again and must give the logits that base and adapter gave, on a few rows of the
    run's own data.
    """
    if run.startswith("-"):
        raise UserError(f"the run folder comes first: automodel export RUN {shlex.quote(run)} …")
    if stack and merge:
        raise UserError("--stack writes an adapter, --merge a whole model. Stack first, then merge what was written.")
    if stack:
        from automodel.adapters.combine import stack_folders
        from automodel.checkpoint.new_folder import new_folder

        with new_folder(out.expanduser()) as writing:
            ranks = stack_folders([run, *stack], writing)
        print(f"{1 + len(stack)} adapters as one in {out}: rank {ranks}. It computes their sum, in PEFT's format.")
        return
    if not merge:
        raise UserError(
            f"say --merge to add the adapter to its base. As an adapter, '{run}' is in PEFT's format already."
        )
    from automodel.models.lean_imports import import_transformers

    import_transformers()
    from automodel.engine.export import export_merged

    done = export_merged(run, out, dtype=dtype, texts=text or [], trust=allowed(trust, allow_remote_data))
    print(
        f"Merged {done.layers} layers into {done.folder} ({done.dtype}); on {done.rows} rows its logits are those of "
        f"base and adapter to {done.difference:.1e} of the largest"
    )
