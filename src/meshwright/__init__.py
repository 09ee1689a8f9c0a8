"""Meshwright plans, runs and keeps alive the training of very large models."""
