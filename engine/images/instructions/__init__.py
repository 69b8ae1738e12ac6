"""Dockerfile instructions: their words (words.py), their records (records.py, mounts.py), and their
effect on an image's configuration (effects.py). Builds use them through engine/builder, commit and
import through changes.py.
"""
