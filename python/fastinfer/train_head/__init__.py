"""Training of a draft head for a model, see :mod:`fastinfer.models.draft_head`."""
