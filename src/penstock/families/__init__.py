"""Models of transformers as they are described in files: families, their parts and sizes, and weights."""
