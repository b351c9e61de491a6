"""Serving of many callers by one engine: prompt preparation, sharing between threads, delivery to event loops."""
