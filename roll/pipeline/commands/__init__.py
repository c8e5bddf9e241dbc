"""Commands outside of a run: on a saved model, on files of prompts and responses, on a key.

``arguments.py`` is what the command line takes; each command is a module that is imported when it is called.
"""
