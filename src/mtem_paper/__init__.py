"""The paper's experiments, repeated: what is compared (`protocol`), run cell by cell (`runner`), and shown (`page`)."""
