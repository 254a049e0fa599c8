"""Token order: where a program's tokens stand, and what an order by modality has to rewrite."""
