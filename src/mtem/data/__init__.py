"""Texts and threads: from files, data frames and lists to batches of token ids."""
