"""Supervised fine-tuning: conversations to imitate."""
