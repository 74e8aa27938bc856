"""BiGCN over reply trees, and what it needs."""
