"""Roots of Debian releases, in which tests install the packages as users do."""
