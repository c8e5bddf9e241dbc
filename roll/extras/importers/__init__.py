"""Converts configurations of other systems: a table of their keys, and what each becomes."""

SYSTEMS = {
    "roll": "ROLL",
    "verl": "verl",
    "verl_sft": "verl's supervised training",
    "chatlearn": "ChatLearn",
    "mindspeed": "MindSpeed RL",
}
"""Their names in print, by the name of the table."""
