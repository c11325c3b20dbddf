"""Models: loading them from transformers, describing their parameters and their memory."""
