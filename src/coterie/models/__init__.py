"""Real checkpoints through Hugging Face Transformers: find, load and watch their MoE layers."""
