"""From local files of rows to micro-batches of token ids, with a count of everything that was left out."""
