"""Fail a CI job when the speed-up over HF Trainer falls below a threshold.

    python validate_performance.py --speedup-threshold 2.0 [-c run.yaml] [options of `automodel benchmark`]

Exit codes: 0 at or above the threshold, 4 below it, 1 when a side failed, 2 for a wrong config.
"""

import argparse
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", action="append", help="repeat it to layer files")
    parser.add_argument("--speedup-threshold", default="2.0")
    options, rest = parser.parse_known_args()
    files = options.config or ["optimized_sentiment_classification.yaml"]
    command = [sys.executable, "-m", "automodel", "benchmark", *(word for file in files for word in ("-c", file))]
    return subprocess.run([*command, "--speedup-threshold", options.speedup_threshold, *rest]).returncode


if __name__ == "__main__":
    sys.exit(main())
