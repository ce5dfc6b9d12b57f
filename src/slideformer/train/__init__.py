"""A run from its config to a saved model. Light to import: nothing here imports torch until it is used."""
