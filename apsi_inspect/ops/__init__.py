"""Verbs over the nouns: open, read, stats, and what comes after."""
