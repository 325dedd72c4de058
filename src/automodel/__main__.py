"""`python -m automodel` is the `automodel` command."""

from automodel.cli.main import command

if __name__ == "__main__":
    command()
