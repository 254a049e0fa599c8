"""Programs that use mmqc."""
