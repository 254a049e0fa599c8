"""Other libraries on the same model, batches and questions: what each loses; see ``compare.py``."""
