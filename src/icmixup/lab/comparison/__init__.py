"""Several methods and seeds on the same data: statistics, tables, figures."""
