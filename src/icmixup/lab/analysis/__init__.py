"""What trained networks do between two classes: the paper's last figure."""
