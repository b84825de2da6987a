"""Label inference."""
