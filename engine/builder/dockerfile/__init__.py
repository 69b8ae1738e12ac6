"""The Dockerfile language: text to lines (lines.py), lines to stages (stages.py), the variables of
a stage (scope.py), and the names of steps (titles.py). Pure.
"""
