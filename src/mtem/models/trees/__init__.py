"""BiGCN, a classifier of threads, and its features of posts."""
