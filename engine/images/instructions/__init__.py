"""Dockerfile instructions: their words (words.py), their records (records.py), and their effect on
an image's configuration (effects.py). Commit and import use the latter through changes.py, builds
through engine/build.
"""
