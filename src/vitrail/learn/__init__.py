"""Learning: recipes, objectives, the loop, the run folder. Knows no family of models."""
