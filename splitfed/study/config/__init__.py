"""The configuration of a study: its tables, their checks, and the objects they describe."""
