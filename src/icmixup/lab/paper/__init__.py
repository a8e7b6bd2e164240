"""The tables and figures of the paper: published numbers, our results, and how they are shown."""
