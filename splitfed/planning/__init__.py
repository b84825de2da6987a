"""What a run will cost before anything is trained: its schedule played over parties that only count."""
