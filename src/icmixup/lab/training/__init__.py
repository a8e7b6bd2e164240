"""A recipe, and the loop that trains it: run folders, steps, evaluation, ranks."""
