"""Notebook views: rich output, magics, widgets."""
