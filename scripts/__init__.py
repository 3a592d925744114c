"""Verbs for people who work on optune; a package so that `python -m scripts.bench` runs from the repository's root."""
