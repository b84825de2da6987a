"""Differential privacy: accountants, the ledger of a run, and audits."""
