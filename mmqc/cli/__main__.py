"""`python -m mmqc.cli`."""

from mmqc.cli.app import app

if __name__ == "__main__":
    app()
