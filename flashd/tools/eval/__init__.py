"""``flashd eval``: what skipping neurons costs in quality (LLM in a flash, section 5.1 and Table 1)."""
