"""Words that keep a text from stating its number or letter: negations, doubts, bounds, words that take something back.

Parts of regular expressions, for ``re.IGNORECASE``, that the verifiers which read sentences share. What stands right
around a marked answer has patterns of its own (``roll.extras.maths.marks``).
"""

from __future__ import annotations

NEGATIONS = (
    r"(?:\b(?:not|no|none|never|neither|nor|nothing|nobody|cannot|hardly|barely|nicht|kein\w*|niemals|ne|pas|jamais"
    r"|nunca|jamás|não|non(?!-)|mai|не|нет|ни|nie|niet|geen)\b|n['’]t\b|[不没沒非未]|ない|ません|아니)"
)
FAULTS = (
    r"(?:\b(?:wrong(?:ly)?|incorrect(?:ly)?|false(?:ly)?|untrue|impossible|invalid|undefined|mistake\w*|fail(?:s"
    r"|ed)?|excluded?|exclud(?:es|ing)"
    r"|reject\w*|eliminat\w+|avoid\w*|refus\w*|contradict\w*|overcount\w*|disprov\w+|falsch|faux|falso|неверно)\b"
    r"|[❌✗✘])"
)
DOUBTS = (
    r"(?:\b(?:if|unless|whether|provided|maybe|perhaps|possibly|probably|might|(?-i:may)|could|guess\w*|doubt\w*"
    r"|unlikely|un\w*sure"
    r"|den(?:y|ies|ied)|tempt\w+|naive(?:ly)?|suppos\w+|assum\w+|imagine|thought|initially|at first|expects?"
    r"|suspect\w*|conjectur\w*|presum\w*|(?:(?:lower|upper) bounds?|estimates?|approximations?) (?:is|are|gives?)"
    r"|let['’]?s say|say(?=,)|wäre|würde|gäbe|serait|sería|fuera\w*|angenommen|supongamos|supposons|pretend"
    r"|hop(?:es?|ed)|wish\w*|wants?|wanted"
    r"|likes? to|so far|for now|vielleicht|wenn|vermutlich|peut-être|si|quizás?|tal vez|forse|talvez|если|возможно)\b"
    r"|可能|也许|如果|假设|似乎)"
)
ALTERNATIVES = r"(?:\b(?:or|either|oder|ou|или|except|besides|other than|except for)\b|[或]|除了)"
BOUNDS = (
    r"(?:\b(?:at least|at most|no more|no less|more|less|fewer|between|about|approximately|approx|around|roughly"
    r"|circa|ca|nearly"
    r"|almost|close|near|over|under|above|below|up to|than|exceed\w*|über|unter|hasta|mindestens|wenigstens"
    r"|como (?:máximo|mínimo)|al menos|au (?:plus|moins)|höchstens|etwa|ungefähr|mehr|weniger"
    r"|größer|kleiner|environ|presque|plus de|moins|casi|quasi|más|menos|mayor|menor|около|примерно|больше|меньше"
    r"|более)\b"
    r"|至少|最多|超过|少于|大于|小于|大约|大概|约|几乎|接近|[≈∼~])"
)
RETRACTIONS = (
    r"(?:no|not|wait|actually|but|however|though|yet|oops|sorry|correction|scratch that|hmm+|hold on"
    r"|on second thought|alternatively|unfortunately|except|unless|or|instead)\b"
)
"""What a sentence begins with that takes back what was said before it."""
