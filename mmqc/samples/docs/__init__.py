"""docs-vqa: questions about rendered documents (lines of text, receipts, tables, charts, forms, photographs, whole pages)."""
