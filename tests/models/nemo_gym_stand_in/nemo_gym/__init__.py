"""Stands in for the package nemo-gym 0.4 in tests: the names that the product uses of it."""
