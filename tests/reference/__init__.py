"""The reference pages in docs/reference, written from the code by `python -m tests.reference`."""
