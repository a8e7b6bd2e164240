"""Trained networks between two classes and on shifted data, and the HTML report."""
