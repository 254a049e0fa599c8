"""What was done to a model, and how well: as values, text, HTML and plots."""
