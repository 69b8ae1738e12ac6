"""The Dockerfile language: text to lines (lines.py), lines to stages (stages.py), and the variables
of a stage (scope.py). Pure.
"""
