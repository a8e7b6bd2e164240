"""The paper's tables and figures: published numbers, our runs, pages made from them."""
