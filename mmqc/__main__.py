"""`python -m mmqc`: the command line."""

from mmqc.cli.app import app

if __name__ == "__main__":
    app()
