"""Statistics: measures of dependence and information, intervals, and reference scores."""
