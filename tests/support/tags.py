"""What a policy says to an environment that looks for an answer between tags."""


def answer(name: str) -> str:
    return f"<answer>{name}</answer>"
