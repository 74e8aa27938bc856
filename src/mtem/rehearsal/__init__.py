"""Rehearsal: each source domain stands for the target once, its labels hidden, to see what adaptation is worth."""
