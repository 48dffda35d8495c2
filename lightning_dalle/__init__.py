"""PyTorch Lightning plugin suite for training generative image and video models."""
