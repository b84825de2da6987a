"""Rules that divide rows among clients, one a file: labels or domains in, positions for each client out."""
