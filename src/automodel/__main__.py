"""`python -m automodel` is the `automodel` command."""

import os
import sys

if __name__ == "__main__":
    try:
        from automodel.cli.main import command
    except KeyboardInterrupt:  # as soon as this: a traceback would be all there is to see
        if "RANK" not in os.environ:  # whoever started the ranks speaks for them
            print("Stopped.", file=sys.stderr)
        sys.exit(130)
    command()
