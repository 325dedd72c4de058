"""`python -m automodel` is the `automodel` command."""

from automodel.cli.main import main

if __name__ == "__main__":
    main()
