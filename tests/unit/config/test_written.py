"""What is written of values: `${NAME}` as typed, and secrets hidden."""

import pytest

from automodel.config.dump import dump_config, with_hidden_secrets
from automodel.config.errors import ConfigError, UserError
from automodel.config.load import load_config
from automodel.config.written import HIDDEN, as_written, hide_in_setting, hide_secrets, is_secret_key
from automodel.plan.check import load_run_config
from automodel.plan.config import RunConfig

SMALL = "model: bert\ndataset: reviews.csv\n"
TOKEN = "hf_" + "AbCdEfGhIj" * 3


def load(tmp_path, text: str, *settings: str) -> RunConfig:
    (tmp_path / "run.yaml").write_text(text)
    return load_config(RunConfig, [tmp_path / "run.yaml"], settings)


def test_a_config_is_written_as_it_was_typed_and_reads_back_the_same(tmp_path, monkeypatch):
    for name, value in {"STEPS": "20", "FAST": "true", "TEAM": "blue", "RATE": "1e-4"}.items():
        monkeypatch.setenv(name, value)
    cfg = load(
        tmp_path,
        SMALL + "seed: ${SEED,7}\nstep_scheduler: {max_steps: '${STEPS}'}\noptimizer: {lr: '${RATE}'}\n"
        "training_optimizations: {use_compile: '${FAST}'}\n"
        "wandb: {tags: [plain, 'team-${TEAM}', 'not $${TEAM}'], name: 2024}\nmlflow: {tags: {team: '${TEAM}'}}\n",
        "wandb.group=${TEAM}s",
    )
    text = dump_config(cfg)
    for line in ("seed: ${SEED,7}", "max_steps: ${STEPS}", "lr: ${RATE}", "use_compile: ${FAST}", "group: ${TEAM}s"):
        assert f"{line}\n" in text
    assert "- plain\n  - team-${TEAM}\n  - not $${TEAM}\n" in text
    assert "blue" not in text
    again = load(tmp_path, text)
    assert again == cfg
    assert dump_config(again) == text


def test_a_value_that_was_replaced_is_written_as_it_is(tmp_path, monkeypatch):
    from dataclasses import replace

    monkeypatch.setenv("SEED", "7")
    cfg = load(tmp_path, SMALL + "seed: ${SEED}\n")
    assert "seed: ${SEED}\n" in dump_config(cfg)
    assert "seed: 8\n" in dump_config(replace(cfg, seed=8))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (f"use {TOKEN} here", f"use {HIDDEN} here"),
        ("https://me:pa:ss@host:80/x", f"https://me:{HIDDEN}@host:80/x"),
        ("postgresql://me:p%40ss@host/db", f"postgresql://me:{HIDDEN}@host/db"),
        ("https://0123456789abcdef@host/x", f"https://{HIDDEN}@host/x"),
        ("git+ssh://git@host/x", "git+ssh://git@host/x"),
        ("https://host/@someone/x?page=2", "https://host/@someone/x?page=2"),
        ("https://h/x?a=1&sig=abc%2F&b=2", f"https://h/x?a=1&sig={HIDDEN}&b=2"),
        ("https://h/x?X-Amz-Signature=abc", f"https://h/x?X-Amz-Signature={HIDDEN}"),
        ("https://${USER_NAME}:${PASSWORD}@host", "https://${USER_NAME}:${PASSWORD}@host"),
        ("${API_KEY,abc}", f"${{API_KEY,{HIDDEN}}}"),
        ("${BATCH,8}", "${BATCH,8}"),
        ("Authorization: Bearer abcdef0123456789", f"Authorization: Bearer {HIDDEN}"),
        ("a commit: 0123456789abcdef0123456789abcdef01234567", "a commit: 0123456789abcdef0123456789abcdef01234567"),
        ("sk-proj-abcDEF1234567890abcd", HIDDEN),
        ("sk-0123456789abcdef0123456789abcdef", HIDDEN),
        ("./runs/sk-abstractive-summarization", "./runs/sk-abstractive-summarization"),
        ("data/wiki-sk-sentences-2024.jsonl", "data/wiki-sk-sentences-2024.jsonl"),
        ("List the basic responsibilities of {job}.", "List the basic responsibilities of {job}."),
        ("Basic text-classification", "Basic text-classification"),
        ("[PAD] hf-internal-testing/tiny, hf_models", "[PAD] hf-internal-testing/tiny, hf_models"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text, written):
    assert hide_secrets(text) == written
    assert hide_secrets(written) == written


def test_keys_whose_values_are_secrets():
    secret = [
        "password",
        "api_key",
        "apikey",
        "hf_token",
        "token",
        "AWS_SECRET_ACCESS_KEY",
        "db.password",
        "auth_token",
    ]
    plain = ["tokenizer", "pad_token", "eos_token", "max_tokens", "bucket_tokens", "key_columns", "tokens", "monkey"]
    assert [key for key in [*secret, *plain] if is_secret_key(key)] == secret
    assert hide_in_setting("model.token=abc") == f"model.token={HIDDEN}"
    assert hide_in_setting("optimizer.lr=1e-4") == "optimizer.lr=1e-4"


def test_a_hidden_secret_is_not_taken_for_the_secret(tmp_path):
    cfg = load(tmp_path, SMALL + f"wandb: {{notes: {TOKEN}}}\nmlflow: {{tags: {{api_key: abc}}}}\n")
    assert with_hidden_secrets(cfg) == ["wandb.notes", "mlflow.tags.api_key"]
    text = dump_config(cfg)
    assert TOKEN not in text
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert [problem.path for problem in caught.value.problems] == ["wandb.notes", "mlflow.tags.api_key"]
    assert "Write `${NAME}` here and set that variable" in str(caught.value)
    assert load(tmp_path, text, "wandb.notes=none", "mlflow.tags.api_key=abc").wandb.notes is None


def test_sentences_have_the_name_of_a_variable_and_not_its_value(tmp_path, monkeypatch):
    secret = "/mnt/private 8/rows.csv"
    for name, value in {"ROWS": secret, "WORD": "data", "SHORT": "12", "MY_PASSWORD": "abc"}.items():
        monkeypatch.setenv(name, value)
    text = "model: ${WORD}\ndataset: '${ROWS}'\nwandb: {name: '${SHORT}', notes: '${MY_PASSWORD}'}\n"
    load(tmp_path, text)
    assert as_written(f"no file {secret!r} in 12 data") == "no file '${ROWS}' in 12 data"
    assert as_written("/mnt/private%208/rows.csv or abc, not abcd") == "${ROWS} or ${MY_PASSWORD}, not abcd"
    assert str(UserError(f"there is no {secret}")) == "there is no ${ROWS}"
    monkeypatch.setenv("ROWS", "elsewhere.csv")
    assert as_written(secret) == secret


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "optimizer: {lr: '${SECRET_RATE}'}",
            "optimizer.lr: expected a number (above 0), got text from the environment",
        ),
        ("lr_scheduler: ${SECRET_RATE}", "lr_scheduler.name: there is no such value as text from the environment"),
        ("optimizer: {betas: '${SECRET_RATE}'}", "got text from the environment (${SECRET_RATE})"),
        ("task: ${SECRET_RATE}", "(${SECRET_RATE}) here; choose one of"),
        ("optimizer: {lr: '${NEGATIVE}'}", "must be above 0, got a whole number from the environment (${NEGATIVE})"),
        ("model: {_target_: '${SECRET_RATE}', pretrained_model_name_or_path: x}", "${SECRET_RATE}"),
    ],
)
def test_a_wrong_value_of_a_variable_is_not_shown(tmp_path, monkeypatch, text, message):
    monkeypatch.setenv("SECRET_RATE", "hunter2pass")
    monkeypatch.setenv("NEGATIVE", "-31337")
    (tmp_path / "run.yaml").write_text("dataset: x.csv\n" + ("" if "model" in text else "model: b\n") + text + "\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config([tmp_path / "run.yaml"])
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "31337" not in str(caught.value)
