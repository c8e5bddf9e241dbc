"""Answers in sentences: the expression that a text states as its answer.

An expression counts where the sentence around it is understood: a word that states ("is", "=", "gives", "has") or a
colon before it, and nothing in its clause that denies it, doubts it or changes it ("not", "can't", "if", "half of").
Otherwise the whole sentence is the answer, which equals no number.
"""

from __future__ import annotations

import re

from roll.rewards.maths.units import MULTIPLIERS, changes_number, is_unit

MAX_SEARCHED_CHARS = 4000
"""Only this much of a response's end is searched for an expression that nothing marks as the answer."""

_WORD = r"(?<![\\\w{])[^\W\d_]{2,}"
_PROSE = re.compile(rf"\$[^$]*[^\s$][^$]*\$|\\[(\[]|\\boxed|{_WORD}[,:]?\s+(?:{_WORD}|[-−(]?\d|\(?[A-J]\b)")
"""Two words, a word before a number, or LaTeX that is marked as such: the expression in it must be found."""
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)[a-z]*\s*\{[^{}]*\}")
_CUE = re.compile(
    r"(?:\banswer\b[\s*_]{0,5}(?:(?:is|are|should be|must be|would be|equals)\b|:|=)"
    r"|\b(?:antwort|lösung|ergebnis)\b\s*(?:(?:ist|lautet|beträgt)\b|:)"
    r"|\b(?:réponse|résultat|respuesta|resultado|resposta|risposta)\b\s*(?:(?:finale|final)\s+)?(?:(?:est|es)\b|é\b|è\b|:)"
    r"|\bответ\b\s*[:—–-]|\b(?:antwoord|svar|odpowiedź|cevap|đáp án)\b\s*:"
    r"|(?<!不)选(?:择)?\s*[:：]?|答案?\s*(?:是|为|為|等于|[:：=])|答え\s*[はを:：]|(?:정답|답)\s*[은:：])[\s*_:：]{0,5}",
    re.IGNORECASE,
)
_CUED = re.compile(
    rf"^(?:\\text\s*\{{\s*|(?:so|thus|hence|therefore),?\s*|the\s+|final\s+)*{_CUE.pattern}\s*\}}?", re.I
)
"""A whole answer that begins with "the answer is"."""
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)(?![^$]{0,200}\$(?:\s|[.,]|$))|[。！？]|\n\s*\n")
_MATHS = re.compile(r"\$\$(.+?)\$\$|(?<![\\\d])\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,|;|and|or|,\s*and|,\s*or)\s*")
_MATHY = re.compile(
    r"(?:[\d+\-−*/^=<>≤≥()\[\]{}|.,:;!%°$€£±×·÷√π∞∪∩′_&~]|\\[a-zA-Z]+|\\.|(?<![^\W\d_])[^\W\d_](?![^\W\d_])"
    r"|sqrt|sin|cos|tan|log|ln|exp|pi|infinity|frac)+"
)
_FEW_WORDS = re.compile(r"[*_\s]*[^\W\d_]{1,20}(?:\s[^\W\d_]{1,20}){0,2}[*_.\s]*")
"""A whole response that is no sentence: "Yes"."""
_SUBSTANCE = re.compile(r"\d|\\(?!f?boxed\b|fbox\b)[a-zA-Z]|π|∞|√")
_NOT_MATHS = {"a", "A", "I", "-", ".", ",", ":", "–"}

# --- what a clause says of its expression -----------------------------------------------------------------------------

_CLAUSE = re.compile(r"[.!?;:,—]\s|\n|\b(?:so|therefore|thus|hence|then)\b", re.IGNORECASE)
_LEADS = re.compile(
    r"(?:\b(?:is|are|was|were|equals?|equalled|gives?|gave|gets?|got|makes?|made|have|has|had|obtains?|yields?|becomes?"
    r"|finds?|found|needs?|needed|takes?|took|costs?|weighs?|earns?|earned|spends?|spent|sold|sells?|saves?|saved|pays?"
    r"|paid|ate|eats?|contains?|receives?|received|remain|remains|left|leaves|total|totals|exactly|only|precisely"
    r"|therefore|thus|so|hence|then|answer|result|value|number|option|choice|point|length|area|probability)"
    r"|\b(?:must|should|will|would|to|shall) be"
    r"|\b(?:total|sum|product|area|perimeter|volume|length|value|cost|price|amount|result|answer|probability|average"
    r"|distance|speed|number|score|profit|radius|slope) of"
    r"|\b(?:equal|simplifies|simplify|reduces|evaluates|leads|comes|sums|adds up|amounts|up|corresponds|converges) to"
    r"|\bgives? us|\b(?:it|that|there|here|answer)['’]s|\bresults? in"
    r"|\b(?:es|est|ist|son|sind|è|é|são|beträgt|lautet|ergibt|равно|равен|равна)|[:=≈]|#+"
    r"|[有是为為得到共要需了剩]|等于)$",
    re.IGNORECASE,
)
"""What may stand before an expression that is stated."""
_UNCERTAIN = re.compile(
    r"\b(?:not|never|neither|nor|no|none|nothing|nobody|cannot|without|except|unless|hardly|barely|wrong|wrongly"
    r"|incorrect|incorrectly|false|falsely|impossible|invalid|mistaken|mistakenly|reject\w*|exclud\w*|avoid\w*|doubt\w*"
    r"|den(?:y|ies|ied)|if|whether|maybe|perhaps|might|may|could|possibly|probably|guess\w*|or|either|between|twice"
    r"|half|double|times|minus|negative)\b|n['’]t\b|\b(?:nicht|kein\w*|ne|pas|не|нет|nunca|nie|não|non|jamais|oder|ou|или|quizás|weniger|mehr|menos|más|moins|меньше|больше)\b|[不没沒非未或]|可能|大约|至少|最多|超过|除了",
    re.IGNORECASE,
)
_STATED_BEHIND = re.compile(
    r"\s*(?:is|as)\s+(?:the|our|my)\s+(?:\w+\s+)?(?:answer|result|solution|value)\b[\s*.]*$", re.I
)
_GOVERNED = re.compile(
    r"(?:(?:\bnot|n['’]t|\bnever|\bcannot|\brather than|\binstead of|\bexcept|\bbut(?=\s*$)|\bother than|\bneither"
    r"|\bnor|\bunlike|\bno longer|\bhardly|\bwrong(?:ly)? to|\bincorrect to|\b(?:false|wrong|incorrect|untrue) that)"
    r"(?:\s+(?!(?:is|are|was|were|equals|gives?|has|have|get|gets|but)\b)[^\s,.;:=]+){0,4}"
    r"|(?:n['’]t|\bnot|\bnever|\bnobody|\bno one)\b.{0,30}?\b(?:think|believes?|say|claim|agree|accept|suggest"
    r")\b[^.,;:]{0,60}|\bno way\b[^.,;:]{0,60}|\b(?:doubt|deny|false that|denies|reject)\b[^.,;:]{0,60}"
    r"|\b(?:wrong|incorrect|false|mistaken)\s+(?:answer|result|value|solution|number)?\s*(?:is|would be|was)?"
    r"|\b(?:different|differs?|distinct|far|away|apart|aside)\s+from|\b(?:twice|half|double)(?:\s+of)?)"
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


_TAKEN_BACK = re.compile(
    r"\b(?:that|this|it)(?:['’]s| is| was)\s+(?:\w+\s+)?(?:false|wrong|incorrect|a lie|not (?:right|correct|true|it|so"
    r"|the answer))\b|\b(?:that|this|it) isn['’]t (?:right|correct|true|it|the answer)\b",
    re.IGNORECASE,
)
_PART_OF_TERM = re.compile(
    r"(?:[/^<>≠≤≥±√] ?|(?<=[^*\s])[*_]|(?<=[^\s])\+ ?|(?:\d|\b[a-zA-Z]|[)}]) ?[-−+*] ?|(?<![*\w])[-−]|[=$(] ?[-−] ?"
    r"|\\(?:cdot|times|div|pm|mp|n(?:eq?|ot|eg)|[lg](?:e|eq|t|eqslant)|sqrt) ?|\\d?frac ?\{[^{}]*\}? ?\{?|\d)\{?$"
)
_GOES_ON = re.compile(
    r"\s*\}*\s*(?:[/^_!]|[-−+<>](?=\s*[\d\\(a-z]\b)|\*(?!\*)|\\(?:cdot|times|div|pm|mp)\b|\$?\s*,?\s*(?:or|to)\s+"
    r"(?:\$|\\|\d|maybe|perhaps|possibly|else|even)|\$?\s*(?:\\text\{\s*)?(?:half|halves|percent of|times|squared|cubed"
    r"|dozens?|hundreds?|thousands?|\w*illions?|\w+(?:teen|[rfxghtnl])ths?)\b)"
)
"""What makes a box a part of a longer term, or one of two answers."""


def denied(before: str, behind: str) -> bool:
    """Tells whether the words around an answer that is marked say that it is none.

    >>> denied("The answer is not ", "."), denied("Since x is not 0, we get ", "."), denied("", " is wrong.")
    (True, False, True)
    """
    clause = re.split(r"[.!?;]\s|\n|\b(?:so|therefore|thus|hence|then|we get)\b", before[-300:])[-1]
    behind = behind[:200]
    return bool(_GOVERNED.search(clause) or _RETRACTED.match(behind) or _TAKEN_BACK.search(behind))


def is_part(before: str, behind: str) -> bool:
    """Tells whether what stands between is a part of something longer: ``2 \\cdot``, ``^2``, "or 31", "million"."""
    before = re.sub(r"</?\w+>", ".", before[-60:])
    return bool(_PART_OF_TERM.search(before) or _GOES_ON.match(behind[:60]))


def _stated(before: str, behind: str, measured: bool = False) -> bool:
    """Tells whether the words around an expression that nothing marks state it as the value of something."""
    lead = before.rstrip(" *_$(\"“'")
    clause = _CLAUSE.split(lead)[-1] if not lead.endswith((",", ";")) else re.split(r"[.!?]\s|\n", lead)[-1]
    rest = (_SENTENCE_END.split(behind, maxsplit=1) or [""])[0]
    if _UNCERTAIN.search(clause) or behind.lstrip("*_$ ").startswith("?") or denied(lead, behind):
        return False
    words = rest.strip(" *_$").split()
    if re.search(r"\w$", clause.rstrip()) and not _LEADS.search(clause.rstrip()):
        return False
    if words and _STATED_BEHIND.match(rest):
        return True
    if words and not clause.strip():
        return len(words) == 1 and is_unit(words[0].rstrip(",.;"))
    changed = _COMPARED.match(" ".join(words)) if measured else words and changes_number(words[0])
    return not (changed or _UNCERTAIN.search(rest))


_COMPARED = re.compile(
    r"(?:less|more|fewer|short|or|below|above|under|over|than|plus|minus|times|to\s+\d)\b", re.IGNORECASE
)


# --- where the expression is ------------------------------------------------------------------------------------------


def said_in(marked: str) -> str:
    """The expression in a sentence that is marked as the answer; where none says so, all of it is the answer."""
    whole = re.fullmatch(r"\\text\s*\{([^{}]*)\}", marked)
    marked = _CUED.sub("", whole[1] if whole and _CUED.match(whole[1]) else marked)
    if _PROSE.search(_TEXT.sub("", marked)):
        return _behind_cue(marked) or _last_marked(marked) or marked
    return marked


def last_expression(text: str) -> str | None:
    """The answer in prose: behind "the answer is", else in the last LaTeX, else the last run of mathematical signs."""
    tail = text[-MAX_SEARCHED_CHARS:].strip()
    found = _behind_cue(tail) or _last_marked(tail) or _last_run(tail) or _last_choice(tail)
    return found or (tail if _FEW_WORDS.fullmatch(tail) else None)


def _last_choice(text: str) -> str | None:
    """The letter that is the last line, or that "the correct option is" names."""
    match = _CHOICE.search(text)
    return match[1] if match and not _UNCERTAIN.search(_CLAUSE.split(text[: match.start(1)])[-1]) else None


_CHOICE = re.compile(
    r"(?:^|\n|\b(?:option|choice)\s+(?:is|:)\s*|:\s*)(?:option\s+|choice\s+)?[*_\s]*(\(?[A-J]\)?)[*_\s.]*$",
    re.IGNORECASE,
)


def _behind_cue(text: str) -> str | None:
    """The expression that a few words behind "the answer is" hold."""
    cues = list(_CUE.finditer(text))
    if not cues:
        return None
    before, rest = text[: cues[-1].start()], text[cues[-1].end() :]
    end = _SENTENCE_END.search(rest)
    said = (rest[: end.start()] if end else rest).strip().strip("*_").strip()
    said = re.sub(r"(?:です|である|だ|입니다|이다)$", "", said).strip()
    if _UNCERTAIN.search(_CLAUSE.split(before)[-1]) or (
        end and (_RETRACTED.match(rest[end.end() :]) or _TAKEN_BACK.search(rest[end.end() :][:200]))
    ):
        return text[cues[-1].start() :]
    marked = _last_marked(said)
    if marked is not None:
        return marked
    choice = re.match(r"(?:option|choice)?\s*(\(?[A-J]\)?)(?![\w'’])(?:[.:,]|$|\s+(?=because|since|as\b))", said)
    if choice:
        return choice[1]
    if not _PROSE.search(said):
        return said or None
    return _last_run(said, lead="=")


def _last_marked(text: str) -> str | None:
    """The last ``$…$``, with those before it that a comma or a conjunction joins to it."""
    found: list[str] = []
    following: int | None = None
    behind = ""
    for match in reversed(list(_MATHS.finditer(text))):
        if following is not None and not _BETWEEN.fullmatch(text[match.end() : following]):
            break
        content = next(group for group in match.groups() if group is not None).strip()
        if not content or re.search(rf"{_WORD}\s+{_WORD}", content):
            break
        behind = behind if found else text[match.end() :]
        found.append(content)
        following = match.start()
    if following is not None and not _stated(text[:following], behind):
        return text
    return ", ".join(reversed(found)) or None


def _last_run(text: str, lead: str = "") -> str | None:
    """The last words that are all signs, numbers, single letters; with a known unit behind them.

    Args:
        lead: what stands before the text.
    """
    for line in reversed(re.sub(_SCRIPT_EDGE, " ", text).splitlines()):
        words = [word.strip("*_`\"'“”") for word in line.split()]
        end = len(words)
        while end > 0:
            if not _is_mathy(words[end - 1]):
                end -= 1
                continue
            start = end - 1
            while start > 0 and (_is_mathy(words[start - 1]) or _joins(words, start - 1)):
                if words[start - 1][-1:] in ".;:!?" and not _joins(words, start - 1):
                    break
                start -= 1
            run, last = _with_unit(words, start, end)
            if _SUBSTANCE.search(run):
                point = words[last - 1][-1:] if words[last - 1][-1:] in ".!?,;:" else ""
                stated = _stated(
                    " ".join([lead, *words[:start]]), " ".join([point, *words[last:]]), measured=last > end
                )
                return run if stated else line
            end = start
    return None


_SCRIPT_EDGE = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])(?=[-−\d$\\(])|(?<=[\d)%])(?=[\u3000-\u9fff])")
"""Between Chinese signs and numbers, where no space is written."""


def _is_mathy(word: str) -> bool:
    return bool(_MATHY.fullmatch(word)) and word not in _NOT_MATHS


def _joins(words: list[str], index: int) -> bool:
    """``3 or 4``: a conjunction between two numbers."""
    return words[index] in ("and", "or") and index > 0 and _is_mathy(words[index - 1])


def _with_unit(words: list[str], start: int, end: int) -> tuple[str, int]:
    """A run of words with the unit behind it, and where that ends."""
    run = words[start:end]
    for word in words[end : end + 2]:
        bare = word.rstrip(".,;:!?")
        if run[-1][-1:] in ".,;:!?" or not (is_unit(bare) or bare in MULTIPLIERS or bare in ("percent", "%")):
            break
        run.append(bare)
    text = " ".join(run)
    kept = text if text.endswith("!") and re.search(r"[\w)]!$", text) else text.rstrip(".,;:!?")
    return kept, start + len(run)
