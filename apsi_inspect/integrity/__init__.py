"""What digests and signatures of .apsim files are, and how they are taken and checked (`docs/apsim.md`, 6 and 7)."""
