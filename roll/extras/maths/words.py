"""Words that keep a text from stating its number or letter: negations, doubts, bounds, words that take something back.

Parts of regular expressions, for ``re.IGNORECASE``, that the verifiers which read sentences share. What stands right
around a marked answer has patterns of its own (``roll.extras.maths.words``).
"""

from __future__ import annotations

import re

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


_GOVERNED = re.compile(
    r"(?:(?:\bnot|n['’]t|\bnever|\bcannot|\brather than|\binstead of|\bexcept|\bbut(?=\s*$)|\bother than|\bneither"
    r"|\bnor|\bunlike|\bno longer|\bhardly|\bwrong(?:ly)? to|\bincorrect to|\b(?:false|wrong|incorrect|untrue) that)"
    r"(?:\s+(?!(?:is|are|was|were|equals|gives?|has|have|get|gets|but)\b)[^\s,.;:=]+){0,4}"
    r"|(?:n['’]t|\bnot|\bnever|\bnobody|\bno one)\b.{0,30}?\b(?:think|believes?|say|claim|agree|accept|suggest"
    r")\b[^.,;:]{0,60}|\bno way\b[^.,;:]{0,60}|\b(?:doubt|deny|false that|denies|reject)\b[^.,;:]{0,60}"
    r"|\b(?:wrong|incorrect|false|mistaken)\s+(?:answer|result|value|solution|number)?\s*(?:is|would be|was)?"
    r"|(?:n['’]t|\bnot)\s+(?:true|right|correct|the case)\s+that\b[^.;:]{0,60}"
    r"|\b(?:different|differs?|distinct|far|away|apart|aside)\s+from"
    r"|\b(?:twice|half|double)(?:\s+of)?)"
    r"[\s$*_(:=\\\[{]*$",
    re.IGNORECASE,
)
"""A negation that an expression's place is in, though its clause says something: "not equal to"."""
_RETRACTED = re.compile(
    r"[\s$).*\]\\,;:!?—-]*(?:(?:but|which|and|though|actually|however|no|that|this|it|the answer)\b[\s,.]*){0,4}"
    r"(?:(?:is|was|are|were|would|seems?|looks?|can|could|must|should|does|do|has|have|wo|ca)\b|['’]s\b)?\s*"
    r"(?:(?:be|to be|clearly|also|just|simply|obviously|certainly|definitely|surely|an?|the)\s+){0,2}"
    r"(?:not\b(?!\s+[$\\(]*[-−\d])|\w*n['’]t\b|cannot\b|wrong\b|incorrect|false\b|impossible|invalid|mistaken|fails\b|wait\b|too\b"
    r"|excluded|ruled out|rejected|discarded"
    r"|(?<=no)[,.!])",
    re.IGNORECASE,
)
TAKEN_BACK = re.compile(
    r"\b(?:that|this|it)(?:['’]s| is| was)\s+(?:\w+\s+)?(?:false|wrong|incorrect|a lie|not (?:right|correct|true|it|so"
    r"|the answer))\b|\b(?:that|this|it) isn['’]t (?:right|correct|true|it|the answer)\b",
    re.IGNORECASE,
)
CORRECTED = re.compile(
    r"\b(?:oops|correction|scratch that|on second thought|(?:made|is|was|contains) (?:an?|some) (?:error|mistake)"
    r"|(?:correct|right|actual|real|true) (?:answer|value|result) (?:is|was|should)|hmm+)\b|更正|修正|抱歉",
    re.IGNORECASE,
)
_PART_OF_TERM = re.compile(
    r"(?:[/^<>≠≤≥±√] ?|(?<=[^*\s])[*_]|(?<=[^\s])\+ ?|(?:\d|\b[a-zA-Z]|[)}]) ?[-−+*] ?|(?<![*\w])[-−]|[=$(] ?[-−] ?"
    r"|\\(?:cdot|times|div|pm|mp|n(?:eq?|ot|eg)|[lg](?:e|eq|t|eqslant)|sqrt) ?|\\d?frac ?\{[^{}]*\}? ?\{?|\d)\{?$"
)
_GOES_ON = re.compile(
    r"\s*\}*\s*(?:[/^_!]|[-−+<>](?=\s*[\d\\(a-z]\b)|\*(?!\*)|\\(?:cdot|times|div|pm|mp)\b|\$?\s*,?\s*(?:or|to)\s+"
    r"(?:\$|\\|\d|maybe|perhaps|possibly|else|even)|\$?\s*(?:\\text\{\s*)?(?:half|halves|percent of|times|squared|cubed"
    r"|of\b\s*\}?\s*\$?\d|dozens?|hundreds?|thousands?|\w*illions?|\w+(?:teen|[rfxghtnl])ths?)\b)"
)
"""What makes a box a part of a longer term, or one of two answers."""


def denied(before: str, behind: str) -> bool:
    """Tells whether the words around an answer that is marked say that it is none.

    >>> denied("The answer is not ", "."), denied("Since x is not 0, we get ", "."), denied("", " is wrong.")
    (True, False, True)
    """
    clause = re.split(r"[.!?;]\s|\n|\b(?:so|therefore|thus|hence|then|we get)\b", before[-300:])[-1]
    behind = re.sub(r"\\(?:text|mathrm|mbox)[a-z]*\s*\{", "", behind[:200])
    return bool(_GOVERNED.search(clause) or _RETRACTED.match(behind) or TAKEN_BACK.search(behind))


def is_part(before: str, behind: str) -> bool:
    """Tells whether what stands between is a part of something longer: ``2 \\cdot``, ``^2``, "or 31", "million"."""
    before = re.sub(r"</?\w+>", ".", before[-60:])
    return bool(_PART_OF_TERM.search(before) or _GOES_ON.match(behind[:60]))
