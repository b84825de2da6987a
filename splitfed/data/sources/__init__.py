"""Data sets that come with the package, and readers of files."""
