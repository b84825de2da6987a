"""The runs of a study: queue, workers, results, and what is asked of finished runs."""
