"""Cost and checks of a run before training, from its schedule played over parties that only count."""
