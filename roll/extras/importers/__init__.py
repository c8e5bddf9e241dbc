"""Configurations of other systems: what each of their keys is called here, and how one becomes a configuration."""

SYSTEMS = {
    "roll": "ROLL",
    "verl": "verl",
    "verl_sft": "verl's supervised training",
    "chatlearn": "ChatLearn",
    "mindspeed": "MindSpeed RL",
}
"""Their names in print, by the name of the table."""
