"""Making quantised checkpoints: calibration, methods that round weights, and writers of each layout."""
