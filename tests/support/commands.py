"""The command line, called as a shell would."""

from typer.testing import CliRunner, Result

from mmqc.cli import app as cli


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"})
