"""Compare automodel with HF Trainer on one config: the reference's script as one command.

    python performance_comparison.py [-c optimized_sentiment_classification.yaml] [options of `automodel benchmark`]

Prints the comparison and writes performance_comparison_results.json and report.html to the current folder. Both sides
run in processes of their own on the same weights and tokens; "peak memory" is the peak.
"""

import subprocess
import sys

DEFAULT_CONFIG = "optimized_sentiment_classification.yaml"
DEFAULTS = {"--against": "hf-trainer,hf-trainer-tuned", "--output": "."}


def main() -> int:
    given = sys.argv[1:]
    command = [sys.executable, "-m", "automodel", "benchmark"]
    if not any(argument.startswith(("-c", "--config")) for argument in given):
        command += ["-c", DEFAULT_CONFIG]
    for option, value in DEFAULTS.items():
        if not any(argument.split("=")[0] == option for argument in given):
            command += [option, value]
    return subprocess.run([*command, *given]).returncode


if __name__ == "__main__":
    sys.exit(main())
