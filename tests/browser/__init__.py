"""Tests in a real browser: headless Chromium in front of JupyterLab, both on the loopback interface only."""
