"""Texts and threads: from files, frames and lists to batches of token numbers."""
