"""One rewrite per file.  ``pipeline.py`` holds their order; none of them imports a kernel, Triton or Inductor."""
