"""Digests and signatures of .apsim files, and how they are taken and checked (`docs/apsim-format.md`, 6 and 7)."""
