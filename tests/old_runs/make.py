"""Makes the run folders of commit 66bca91 that `tests/cli/test_old_runs.py` goes on with.

    python tests/old_runs/make.py [KIND …]

Needs the history of git and the installed environment. That commit is checked out into a temporary folder, and its own
`automodel` command makes everything that is kept: a run that a signal stopped half-way, the same run resumed to its
end, and the answers, measurements and weights that it gave. Each kind becomes `tests/old_runs/KIND.tar.xz`:

    project/       model/, train.jsonl, test.jsonl, asked.jsonl and run.yaml: what a user has
    stopped/       the run folder after the signal
    finished/      the run folder after `--resume`
    merged/        of the adapter: base and adapter as one model, by `export --merge`
    expected.json  losses by split and step, answers to asked.jsonl, `evaluate`, digests of what `checkpoint convert`
                   wrote, and the folder that the project lay in
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import tiny_runs as tiny  # noqa: E402

COMMIT = "66bca91"
STOP_AT = 7  # the signal is sent when this step is logged; the run stops at this one or soon after
ATTEMPTS = 20
WORDS = len(tiny.make_tokenizer())
SPREAD = 0.3  # of random weights of width 8: with the usual 0.02 every text would get the same answer

# Five steps an epoch. A checkpoint of every evaluation; the newest and the best are kept.
SETTINGS = """
step_scheduler: {num_epochs: 4, log_every_steps: 1, val_every_steps: 5, ckpt_every_steps: 5, global_batch_size: 8}
training_optimizations: {precision: fp32}
optimizer: {lr: 5e-3, weight_decay: 0.01}
lr_scheduler: {warmup_ratio: 0.1}
dataset: {path: train.jsonl}
validation_dataset: {path: test.jsonl}
checkpoint: {checkpoint_dir: out, keep_last: 1}
"""


@dataclass(frozen=True)
class Kind:
    """A run, and how its model is asked."""

    task: str
    model: Callable[[], Any]
    row: Callable[[random.Random], dict[str, Any]]
    """One row of the data."""
    settings: str = ""
    """YAML that only this kind has."""
    ask: tuple[str, ...] = ("predict",)
    """The verb that answers asked.jsonl, and its options."""
    measure: tuple[str, ...] = ()
    """Options of `evaluate`."""
    decoder: bool = False
    """Whether the tokenizer is that of a language model."""


def bert() -> Any:
    import transformers as t

    return t.BertForMaskedLM(
        t.BertConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=32,
            pad_token_id=0,
            initializer_range=SPREAD,
        )
    )


def distilbert() -> Any:
    import transformers as t

    sizes = {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 32}
    return t.DistilBertForMaskedLM(
        t.DistilBertConfig(vocab_size=WORDS, pad_token_id=0, initializer_range=SPREAD, **sizes)
    )


def llama() -> Any:
    import transformers as t

    return t.LlamaForCausalLM(
        t.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=16,
            max_position_embeddings=64,
            bos_token_id=2,
            eos_token_id=3,
            pad_token_id=0,
            initializer_range=SPREAD,
        )
    )


def t5() -> Any:
    import transformers as t

    return t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=WORDS,
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.1,
            decoder_start_token_id=0,
            eos_token_id=3,
            pad_token_id=0,
        )
    )


def sentence(chance: random.Random) -> tuple[str, int]:
    """Words, and whether their first is a good one."""
    label = chance.randint(0, 1)
    words = [chance.choice(tiny.NEUTRAL) for _ in range(chance.randint(2, 9))]
    return " ".join([chance.choice(tiny.GOOD if label else tiny.BAD), *words]), label


def named_class(chance: random.Random) -> dict[str, Any]:
    text, label = sentence(chance)
    return {"text": text, "label": ("sour", "sweet")[label]}


def several_classes(chance: random.Random) -> dict[str, Any]:
    about = [name for name in ("music", "plot", "actor") if chance.random() < 0.5]
    words = [*about, *(chance.choice(tiny.GOOD) for _ in range(3))]
    chance.shuffle(words)
    return {"text": " ".join(words), "labels": about}


def tagged_words(chance: random.Random) -> dict[str, Any]:
    words = sentence(chance)[0].split()
    tags = ["B-GOOD" if word in tiny.GOOD else "B-BAD" if word in tiny.BAD else "O" for word in words]
    return {"text": " ".join(words), "tokens": words, "ner_tags": tags}


def chat(chance: random.Random) -> dict[str, Any]:
    text, label = sentence(chance)
    answer = f"the answer is {('bad', 'good')[label]} ."
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}


def plain_text(chance: random.Random) -> dict[str, Any]:
    text, label = sentence(chance)
    return {"text": f"{text} . the answer is {('bad', 'good')[label]} ."}


def summary(chance: random.Random) -> dict[str, Any]:
    text, label = sentence(chance)
    return {"document": text, "summary": ("bad", "good")[label]}


GENERATE = ("generate", "--max-new-tokens", "8")
KINDS = {
    "text-classification": Kind("text-classification", bert, named_class),
    "multi-label": Kind("text-classification", distilbert, several_classes),
    "token-classification": Kind("token-classification", bert, tagged_words),
    "causal-lm": Kind(
        "causal-lm",
        llama,
        chat,
        # Two bins a step: thirteen or so hold an epoch.
        "packed_sequence: {packed_sequence_size: 64}\ndataloader: {batch_size: 1}\n"
        "step_scheduler: {num_epochs: 4, log_every_steps: 1, val_every_steps: 5, ckpt_every_steps: 5, "
        "global_batch_size: 2}\n",
        GENERATE,
        ("--generate", "--max-new-tokens", "8"),
        decoder=True,
    ),
    "seq2seq": Kind("seq2seq", t5, summary, "", ("predict", "--max-new-tokens", "4")),
    "lora": Kind("causal-lm", llama, plain_text, "peft: {dim: 4}\n", GENERATE, decoder=True),
}


def make(name: str, kind: Kind, command: Command, folder: Path) -> Path:
    """The archive of one kind."""
    project, out = folder / "project", folder / "project" / "out"
    lay_out(project, kind)
    stop_half_way(command, project)
    shutil.copytree(out, folder / "stopped")
    command.run(project, "finetune", "llm", "-c", "run.yaml", "--resume")
    shutil.copytree(out, folder / "finished")
    expected: dict[str, Any] = {
        "commit": COMMIT,
        "folder": str(project),
        "losses": {split: tiny.losses(out, split) for split in ("train", "validation")},
        "answers": command.json_lines(project, kind.ask[0], "out", "-i", "asked.jsonl", "--json", *kind.ask[1:]),
        "evaluation": command.json(project, "evaluate", "out", "--json", *kind.measure),
    }
    command.run(project, "checkpoint", "convert", "out", "--out", folder / "converted")
    expected["converted"] = digests(folder / "converted")
    if (out / "adapter_config.json").exists():
        command.run(project, "export", "out", "--merge", "--out", folder / "merged")
    shutil.rmtree(out)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))
    return packed(folder, HERE / f"{name}.tar.xz")


def lay_out(project: Path, kind: Kind) -> None:
    import torch

    torch.manual_seed(0)
    kind.model().save_pretrained(project / "model")
    tiny.make_tokenizer(kind.decoder).save_pretrained(project / "model")
    chance = random.Random(0)
    for file, count in (("train", 40), ("test", 12), ("asked", 4)):
        tiny.write_jsonl(project / f"{file}.jsonl", [kind.row(chance) for _ in range(count)])
    own = {line.split(":")[0] for line in kind.settings.splitlines()}
    common = [line for line in SETTINGS.strip().splitlines() if line.split(":")[0] not in own]
    text = "\n".join(["model: model", f"task: {kind.task}", *common, kind.settings])
    (project / "run.yaml").write_text(text)


class Command:
    """`automodel` of the old commit."""

    def __init__(self, checkout: Path, cache: Path) -> None:
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(checkout / "src"),
            "AUTOMODEL_CACHE": str(cache),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, cwd: Path, *arguments: object) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "automodel", *map(str, arguments)]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, cwd=cwd, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, cwd: Path, *arguments: object) -> str:
        process = self.start(cwd, *arguments)
        out, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"{arguments}: exit code {process.returncode}\n{out}\n{errors}")
        return out

    def json(self, cwd: Path, *arguments: object) -> Any:
        return json.loads(self.run(cwd, *arguments))

    def json_lines(self, cwd: Path, *arguments: object) -> list[Any]:
        return [json.loads(line) for line in self.run(cwd, *arguments).splitlines()]


def stop_half_way(command: Command, project: Path) -> None:
    """A run that SIGTERM stops, as Slurm does. Its steps take milliseconds, so it may be over before: then again."""
    for _ in range(ATTEMPTS):
        process = command.start(project, "finetune", "llm", "-c", "run.yaml", "--overwrite")
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"[Step {STOP_AT}/"):
                process.send_signal(signal.SIGTERM)
        code = process.wait()
        if code == 130:
            return
        if code:
            raise SystemExit(f"{project / 'run.yaml'}: exit code {code}\n{process.stderr and process.stderr.read()}")
    raise SystemExit(f"no run was stopped between step {STOP_AT} and its end in {ATTEMPTS} attempts")


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each tensor of a model folder, with its type and shape."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            content = tensor.contiguous().numpy().tobytes()
            found[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"
    return found


def packed(folder: Path, archive: Path) -> Path:
    def as_nobody_in_particular(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name in ("project", "stopped", "finished", "merged", "expected.json"):
            if (folder / name).exists():
                tar.add(folder / name, name, filter=as_nobody_in_particular)
    return archive


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(folder / "checkout"), COMMIT], check=True)
        try:
            command = Command(folder / "checkout", folder / "cache")
            for name in names or KINDS:
                archive = make(name, KINDS[name], command, folder / name)
                print(f"{archive.name}: {archive.stat().st_size:,} bytes")
        finally:
            subprocess.run([*git, "remove", "--force", str(folder / "checkout")], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
