"""One test a known failure of systems like this one, named by its case; `table.py` makes docs/robustness.md of them."""
