"""A Hugging Face decoder-only model as units: how it is cut, how one unit runs, how weights get in and out."""
