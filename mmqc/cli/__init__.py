"""The `mmqc` command; `mmqc.cli.app` has its commands."""
